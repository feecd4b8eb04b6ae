"""A sequence's tokens as they come, for a stream that is told of none of them."""

from collections.abc import Callable


class Followed:
    """Two lists that another appends to, and how much of them is taken. All of it is the engine
    thread's."""

    def __init__(
        self,
        token_ids: list[int],
        ready_s: list[float],
        on_slow: Callable[[], None],
    ) -> None:
        """Args:
        ready_s: when each token was on the host; as long as the tokens.
        on_slow: to be called where more is unread than may be. It must not end the stream itself.
        """
        self._token_ids = token_ids
        self._ready_s = ready_s
        self._num_taken = 0
        self.on_slow = on_slow

    @property
    def num_ahead(self) -> int:
        """Tokens that are not taken yet."""
        return len(self._token_ids) - self._num_taken

    @property
    def last_s(self) -> float:
        """When the last token came; there is one."""
        return self._ready_s[-1]

    def take(self) -> tuple[list[int], list[float]]:
        """Returns the tokens since the last call, and when they came."""
        first, self._num_taken = self._num_taken, len(self._token_ids)
        return self._token_ids[first:], self._ready_s[first:]
