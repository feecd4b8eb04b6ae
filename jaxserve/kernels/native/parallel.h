// Work in equal pieces, on threads of our own.
//
// A decode step is a hundred products of some 50 µs each. XLA's threads sleep between them, and
// waking one takes as long as the product; these stay awake for a moment.
#pragma once

#include <algorithm>
#include <atomic>
#include <cfenv>
#include <chrono>
#include <cstdint>
#include <thread>

#include <pthread.h>
#ifdef __linux__
#include <sched.h>
#endif

namespace jaxserve {

inline void pause_briefly() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// As many threads as there are cores for this process, the caller of `run` being one of them. All
// libraries of a process have one team: several would keep each other from the cores. It is hidden
// because whether they would share it by its name differs from compiler to compiler.
class __attribute__((visibility("hidden"))) Team {
 public:
  static Team& get() { return get_(); }

  // Has this library work with another one's team; comes before its first call.
  static void join(Team& (*get)()) { get_ = get; }

  int64_t num_threads() const { return num_workers_ + 1; }

  // Calls do_piece(0) to do_piece(num_pieces - 1), each once, in any order and from several
  // threads; returns when all are done. Where another call is in here, the caller works alone.
  template <typename Piece>
  void run(int64_t num_pieces, const Piece& do_piece) {
    if (num_pieces <= 1 || num_workers_ == 0 || is_taken_.exchange(true, std::memory_order_acquire)) {
      for (int64_t piece = 0; piece < num_pieces; ++piece) do_piece(piece);
      return;
    }
    do_piece_ = [](const void* piece_of, int64_t piece) {
      (*static_cast<const Piece*>(piece_of))(piece);
    };
    piece_of_ = &do_piece;
    num_pieces_ = num_pieces;
    std::fegetenv(&environment_);
    next_.store(0, std::memory_order_relaxed);
    round_.fetch_add(1);  // odd: there is work
    if (num_asleep_.load() != 0) round_.notify_all();
    take_pieces();
    round_.fetch_add(1);  // even: nobody begins any more
    for (int spins = 1; num_inside_.load() != 0; ++spins) {
      // A worker that is long in coming back may be waiting for this core.
      spins % 1024 ? pause_briefly() : std::this_thread::yield();
    }
    is_taken_.store(false, std::memory_order_release);
  }

 private:
  static constexpr auto kAwake = std::chrono::microseconds(100);

  static Team& get_own() {
    // Never ends: its threads may be at work when the process does. They are not there in a fork.
    static Team* team = [] {
      pthread_atfork(nullptr, nullptr, [] { get_own().num_workers_ = 0; });
      return new Team;
    }();
    return *team;
  }

  Team() : num_workers_(count_cores() - 1) {
    for (int64_t worker = 0; worker < num_workers_; ++worker) {
      // Not std::thread, which would end the process where no more threads may be made.
      pthread_t thread;
      if (pthread_create(&thread, nullptr, &Team::begin, this) != 0) {
        num_workers_ = worker;
        break;
      }
      pthread_detach(thread);
    }
  }

  static int64_t count_cores() {
#ifdef __linux__
    cpu_set_t cores;
    if (sched_getaffinity(0, sizeof cores, &cores) == 0) return std::max(1, CPU_COUNT(&cores));
#endif
    return std::max(1u, std::thread::hardware_concurrency());
  }

  void take_pieces() {
    int64_t piece;
    while ((piece = next_.fetch_add(1, std::memory_order_relaxed)) < num_pieces_) {
      do_piece_(piece_of_, piece);
    }
  }

  static void* begin(void* team) {
    static_cast<Team*>(team)->work();
    return nullptr;
  }

  void work() {
    uint64_t seen = 0;
    while (true) {
      const uint64_t round = wait_for_round(seen);
      num_inside_.fetch_add(1);
      // Only now is it sure that the caller waits for this thread, if the round is still on.
      if (round_.load() == round) {
        std::fesetenv(&environment_);
        take_pieces();
      }
      num_inside_.fetch_sub(1);
      seen = round;
    }
  }

  // Returns the number of a round that has begun, and is not `seen`.
  uint64_t wait_for_round(uint64_t seen) {
    auto asleep_at = std::chrono::steady_clock::now() + kAwake;
    for (int spins = 1;; ++spins) {
      const uint64_t round = round_.load();
      if (round % 2 == 1 && round != seen) return round;
      pause_briefly();
      if (spins % 64 == 0 && std::chrono::steady_clock::now() > asleep_at) {
        num_asleep_.fetch_add(1);
        round_.wait(round);
        num_asleep_.fetch_sub(1);
        asleep_at = std::chrono::steady_clock::now() + kAwake;
      }
    }
  }

  static inline Team& (*get_)() = get_own;

  int64_t num_workers_;
  std::atomic<bool> is_taken_{false};
  std::atomic<uint64_t> round_{0};
  std::atomic<int64_t> next_{0};
  std::atomic<int64_t> num_inside_{0};
  std::atomic<int64_t> num_asleep_{0};
  // written by the caller before a round begins
  void (*do_piece_)(const void*, int64_t) = nullptr;
  const void* piece_of_ = nullptr;
  int64_t num_pieces_ = 0;
  // XLA has its threads take subnormal numbers for 0: a piece must not depend on who computes it
  std::fenv_t environment_;
};

// Has the team do each of T rows of so many numbers: do_row(t). A piece is as long as it takes to
// wake for it.
template <typename Row>
void share_rows(int64_t T, int64_t num_numbers, const Row& do_row) {
  constexpr int64_t kPieceNumbers = 8192;
  const int64_t height = std::max<int64_t>(1, kPieceNumbers / std::max<int64_t>(1, num_numbers));
  Team::get().run((T + height - 1) / height, [&](int64_t piece) {
    const int64_t end = std::min(T, (piece + 1) * height);
    for (int64_t t = piece * height; t < end; ++t) do_row(t);
  });
}

}  // namespace jaxserve
