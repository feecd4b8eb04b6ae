"""The runner: owns parameters, KV pool, state rows and programs, and turns plans into results."""

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np

from jaxserve.config import Config
from jaxserve.metrics import Metrics
from jaxserve.model.config import ModelConfig
from jaxserve.model.packing import pack_params
from jaxserve.model.params import Params
from jaxserve.plan import (
    NO_LAPS,
    Bucket,
    Laps,
    PageCopy,
    RowLoad,
    StepLimits,
    StepMasks,
    StepPlan,
)
from jaxserve.runner import state
from jaxserve.runner.batch import (
    SWAP_WIDTH,
    SampledRows,
    build_masks,
    build_no_masks,
    build_output_rows,
    build_packed,
    build_page_copies,
    build_score_rows,
    find_plan_bucket,
    find_sampled_rows,
)
from jaxserve.runner.buckets import OutputBucket, Reach
from jaxserve.runner.device import find_device
from jaxserve.runner.host_store import HostStore
from jaxserve.runner.in_flight import LaunchedStep
from jaxserve.runner.kernel_choice import choose_kernels
from jaxserve.runner.lowering import head_params
from jaxserve.runner.memory import (
    choose_dtypes,
    naming_lack_of_memory,
    read_cpu_flags,
)
from jaxserve.runner.placement import place_params
from jaxserve.runner.programs import Programs, Progress, program_keys
from jaxserve.runner.prompt_time import time_prompt
from jaxserve.runner.results import build_layout
from jaxserve.runner.row_variants import RowVariants
from jaxserve.runner.sizing import size_runner
from jaxserve.runner.spec import DtypeName, RunnerSpec
from jaxserve.runner.step_counts import StepCounts
from jaxserve.runner.swaps import PageReads, Swaps

logger = logging.getLogger(__name__)

# Returns the parameters in a dtype, as numpy arrays.
LoadParams = Callable[[DtypeName], Params]


class Runner:
    """Runs steps in the order they are launched; the real side of `plan.Runner`.

    Every device array but the results is donated to the program that replaces it, so the bytes
    held never change. After `__init__` nothing is traced or compiled.

    Attributes:
      max_model_tokens: longest prompt + output that this runner can hold.
    """

    def __init__(
        self,
        params: Params | LoadParams,
        model_config: ModelConfig,
        config: Config,
        *,
        metrics: Metrics,
        cache_dir: Path | None = None,
        progress: Progress | None = None,
        reach: Reach | None = None,
        programs: Programs | None = None,
    ) -> None:
        """Sizes the pool, compiles every program, and fills the device.

        Args:
          params: the parameters, whose dtype then holds; or what loads them while programs compile.
          cache_dir: root of the persistent compilation cache; None keeps nothing but
            native kernels, which go to the user's cache folder.
          progress: called after each program, on the calling thread.
          reach: compile only what this one request can reach.
          programs: compiles and keeps them; None takes `Programs`.

        Raises:
          CapacityError: parameters, programs or one full-length sequence do not fit.
          ConfigError: sizes of the configuration that contradict each other or the model.
        """
        device = find_device()
        dtype, kv_dtype = choose_dtypes(
            config, platform=device.platform, cpu_flags=read_cpu_flags()
        )
        if not callable(params):
            dtype = params["embedding_VD"].dtype.name
        self._metrics = metrics
        self._forbid_recompile = config.runner.forbid_recompile
        self._programs = programs or Programs(metrics)
        compile_keys = functools.partial(
            self._programs.compile_all,
            num_threads=config.runner.compile_threads,
            cache_dir=cache_dir,
            progress=progress,
        )
        sizes = size_runner(
            model_config,
            config,
            dtypes=(dtype, kv_dtype),
            kernels=choose_kernels(
                model_config, config, dtypes=(dtype, kv_dtype), device=device, cache_dir=cache_dir
            ),
            programs=self._programs,
            compile_keys=compile_keys,
        )
        self.max_model_tokens = sizes.max_model_tokens
        self._spec, self._scheme = sizes.spec, sizes.scheme
        if reach is not None:
            self._scheme = sizes.scheme.reachable(
                reach, max_step_tokens=config.scheduler.max_step_tokens
            )
        has_host_tier = reach is None and sizes.num_host_pages > 0  # one request drops no page
        keys = program_keys(self._spec, self._scheme, reach, has_host_tier=has_host_tier)
        with ThreadPoolExecutor(1, thread_name_prefix="jaxserve-load") as pool:
            loading = pool.submit(self._load, params, dtype)
            compile_keys(keys)
            self._run = {(key.kind, key.bucket): self._programs[key] for key in keys}
            self._fill_device(loading)
        self._row_variants = RowVariants(self._spec.max_seqs)
        self._awaiting_masks: int | None = None  # the step whose output is not launched yet
        self._swaps = self._build_swaps(sizes.num_host_pages) if has_host_tier else None
        self._counts = StepCounts(
            metrics,
            self._scheme,
            self._spec,
            captured=[key for key in keys if self._programs.is_captured(key)],
        )
        self._programs.forbid_compiles()
        logger.info(
            "runner ready dtype=%s kv_dtype=%s programs=%d command_buffers=%s batch_invariant=%s",
            dtype, kv_dtype, len(keys), self._spec.command_buffers, self._spec.batch_invariant,
        )  # fmt: skip

    def _fill_device(self, loading: Future[Params]) -> None:
        """Puts there all that stays, while weights may still be read: to clear the pool takes as
        long as some of them."""
        with naming_lack_of_memory():
            self._kv, self._state, self._hidden_TD = self._run["init", None]()
            self._params = place_params(loading.result())
            self._head = head_params(self._params)
            self._no_mask = {
                output: jax.device_put(build_no_masks(output, self._spec))
                for output in self._scheme.outputs
                if output.variant == "full"
            }

    def _load(self, params: Params | LoadParams, dtype: DtypeName) -> Params:
        """Returns a tree of our own, as the programs read it."""
        loaded = params(dtype) if callable(params) else jax.tree.map(lambda leaf: leaf, params)
        if self._spec.kernels.matmul == "native":
            pack_params(loaded, self._spec.model)
        return loaded

    @property
    def spec(self) -> RunnerSpec:
        return self._spec

    @property
    def limits(self) -> StepLimits:
        return self._scheme.limits

    @property
    def num_pages(self) -> int:
        return self._spec.num_pages

    @property
    def host_pages(self) -> HostStore | None:
        return None if self._swaps is None else self._swaps.store

    def launch(self, plan: StepPlan, laps: Laps = NO_LAPS) -> LaunchedStep:
        """Dispatches row loads, page moves, forward, scores and output; returns without waiting.
        Where the plan `needs_masks`, the step's `launch_output` dispatches the output.

        Args:
          laps: told of build and dispatch; the step tells it of the rest.

        Raises:
          RecompileError: something was compiled since warm-up, and the configuration forbids it.
        """
        assert plan.has_work, f"an empty plan cannot be launched: {plan}"
        assert self._awaiting_masks is None, (
            f"the output of step {self._awaiting_masks} comes before step {plan.step_id}"
        )
        bucket = find_plan_bucket(plan, self._scheme)
        with jax.transfer_guard("disallow"), self._programs.running(bucket):
            self._load_rows(plan.row_loads, laps)
            page_reads = self._swap_pages(plan)
            self._copy_pages(plan.copies)
            step = self._run_step(plan, bucket, page_reads, laps=laps)
        self._check_no_recompile()
        laps.lap("dispatch")
        return step

    def _run_step(
        self, plan: StepPlan, bucket: Bucket, page_reads: Sequence[PageReads], *, laps: Laps
    ) -> LaunchedStep:
        """Runs forward, scores and, unless it waits for masks, the output."""
        sampled = find_sampled_rows(plan, bucket, self._spec)
        output = self._scheme.find_output(len(sampled), self._row_variants.find(sampled))
        packed_I = build_packed(plan, bucket, self._spec)
        rows_4R = build_output_rows(sampled, output, self._spec)
        scored = list(build_score_rows(plan, bucket, self._spec))
        laps.lap("build")
        step = LaunchedStep(
            self._run_forward(bucket, packed_I),
            scores=[self._run_score(rows_2W) for rows_2W in scored],
            layout=build_layout(plan, bucket, sampled, self._spec),
            metrics=self._metrics,
            laps=laps,
        )
        if self._swaps is not None and page_reads:
            step.add_page_reads(functools.partial(self._swaps.keep, page_reads))
        if plan.needs_masks:
            self._awaiting_masks = plan.step_id
            step.await_masks(
                functools.partial(
                    self._launch_masked, sampled, output, rows_4R, bucket=bucket, laps=laps
                )
            )
        elif len(sampled):
            step.add_output(self._run_output(output, rows_4R, mask_RW=self._no_mask.get(output)))
        self._counts.count_step(plan, bucket, output if len(sampled) else None)
        return step

    def _launch_masked(
        self,
        sampled: SampledRows,
        output: OutputBucket,
        rows_4R: np.ndarray,
        masks: StepMasks,
        *,
        bucket: Bucket,
        laps: Laps,
    ) -> jax.Array:
        """Runs the output that the last forward left."""
        mask_RW = build_masks(sampled, masks, output, self._spec)
        laps.lap("build")
        with jax.transfer_guard("disallow"), self._programs.running(bucket):
            result_RI = self._run_output(output, rows_4R, mask_RW=mask_RW)
        self._awaiting_masks = None
        self._metrics.masked_tokens.inc(len(masks.sequence_ids))
        self._check_no_recompile()
        return result_RI

    def _run_output(
        self, output: OutputBucket, rows_4R: np.ndarray, *, mask_RW: jax.Array | np.ndarray | None
    ) -> jax.Array:
        held, run = self._state, self._run["output", output]
        arguments = (self._head, self._hidden_TD, held.last_token_B, held.sampling, rows_4R)
        if output.variant == "full":
            with _taking_numpy():
                last_token_B, rows, result_RI = run(*arguments, mask_RW)
            self._state = dataclasses.replace(held, last_token_B=last_token_B, sampling=rows)
        else:
            with _taking_numpy():
                last_token_B, result_RI = run(*arguments)
            self._state = dataclasses.replace(held, last_token_B=last_token_B)
        self._counts.count_output(output)
        array: jax.Array = result_RI
        return array

    def _run_score(self, rows_2W: np.ndarray) -> jax.Array:
        with _taking_numpy():
            result_WI: jax.Array = self._run["score", None](self._head, self._hidden_TD, rows_2W)
        self._counts.count_side("score")
        return result_WI

    def _build_swaps(self, num_host_pages: int) -> Swaps:
        """Returns the host tier, measured."""
        swaps = Swaps(
            HostStore(num_host_pages, self._spec),
            self._spec,
            page_out=self._run["page_out", None],
            page_in=self._run["page_in", None],
            metrics=self._metrics,
        )
        token_s = time_prompt(
            self._run_forward,
            scheme=self._scheme,
            spec=self._spec,
            max_model_tokens=self.max_model_tokens,
        )
        self._kv = swaps.measure(self._kv, token_s=token_s)
        return swaps

    def _run_forward(self, bucket: Bucket, packed_I: np.ndarray) -> jax.Array:
        """Returns a mark that is ready when the forward is done."""
        held, run = self._state, self._run["forward", bucket]
        arguments = (held.page_table_BP, self._hidden_TD, held.last_token_B, packed_I)
        with _taking_numpy():
            self._kv, page_table_BP, self._hidden_TD, forward_done = run(
                self._params, self._kv, *arguments
            )
        self._state = dataclasses.replace(held, page_table_BP=page_table_BP)
        mark: jax.Array = forward_done
        return mark

    def _load_rows(self, loads: Sequence[RowLoad], laps: Laps) -> None:
        if not loads:
            return
        for load in loads:
            self._row_variants.load(load)
        for packed_LI in state.build_row_loads(loads, self._spec):
            laps.lap("build")
            with _taking_numpy():
                self._state = self._run["row_load", None](self._state, packed_LI)
            self._counts.count_side("row_load")
            laps.lap("dispatch")
        for triples_3I in state.build_counts(loads, self._spec):
            laps.lap("build")
            rows = self._state.sampling
            counts_BV = self._run["counts", None](rows.counts_BV, jax.device_put(triples_3I))
            self._counts.count_side("counts")
            rows = dataclasses.replace(rows, counts_BV=counts_BV)
            self._state = dataclasses.replace(self._state, sampling=rows)
            laps.lap("dispatch")

    def _swap_pages(self, plan: StepPlan) -> list[PageReads]:
        """Moves pages to and from host memory; returns those that are on their way there. They are
        read before anything of this step is written, for it may write over them."""
        if not (plan.swap_out or plan.swap_in):
            return []
        assert self._swaps is not None, f"step {plan.step_id} swaps, and there is no host tier"
        page_reads = self._swaps.take_out(self._kv, plan.swap_out)
        self._kv = self._swaps.put_in(self._kv, plan.swap_in)
        self._counts.count_side("page_out", -(-len(plan.swap_out) // SWAP_WIDTH))
        self._counts.count_side("page_in", -(-len(plan.swap_in) // SWAP_WIDTH))
        return page_reads

    def _copy_pages(self, copies: Sequence[PageCopy]) -> None:
        for pages_2W in build_page_copies(copies, self._spec):
            self._kv = self._run["page_copy", None](self._kv, jax.device_put(pages_2W))
            self._counts.count_side("page_copy")
        self._metrics.page_copies.inc(len(copies))

    def _check_no_recompile(self) -> None:
        if self._forbid_recompile:
            self._programs.check_no_recompile()


def _taking_numpy() -> contextlib.AbstractContextManager[None]:
    """Lets a program take a step's numpy arrays as they are: to put each on the device before takes
    the host six times as long (60 µs)."""
    guard: contextlib.AbstractContextManager[None] = jax.transfer_guard_host_to_device("allow")
    return guard
