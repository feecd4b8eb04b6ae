"""What tenants have had of the machine, and who of them is ahead of the others."""

from collections.abc import Callable, Iterable, Mapping
from typing import Final

from jaxserve.config import SchedulerSection

TRIM_AT: Final = 64
CREDIT_STEPS: Final = 64  # the largest; that a tenant may save up where nothing else is configured
AHEAD_AT: Final = (
    16  # ahead is who was given a part of the credit more than another: one in so many
)


class FairShares:
    """What each tenant has been given, by its weight: virtual token counters.

    Whoever waits and has had least comes next (Sheng et al., Fairness in Serving Large Language
    Models, OSDI 2024). Who uses less than its share saves up, but no more than the credit: it
    begins at most so far below the least of those that wait. So a burst of one that stays within
    its share comes before the queue of one that does not. Then, between two tenants that always
    have something waiting, what they were given by weight differs by no more than one request of
    each (theorem 4.4) and the credit, whatever they send.

    A tenant is present until so many tokens were given to others after its last.
    """

    def __init__(self, weight_of: Callable[[str], float], *, credit_tokens: int = 0) -> None:
        self._weight_of = weight_of
        self._credit_tokens = credit_tokens
        self._levels: dict[str, float] = {}
        self._floor = 0.0  # the highest that the least of those that wait has been
        self._num_given = 0  # tokens, to all
        self._present: dict[str, int] = {}  # by the last time first: what had been given by then
        self._ahead_above = float("inf")
        self._counted: dict[str, int] = {}

    def level(self, tenant: str) -> float:
        """Returns the tokens it was given, by its weight."""
        found = self._levels.get(tenant)
        return self._lowest(tenant) if found is None else found

    def weight(self, tenant: str) -> float:
        return self._weight_of(tenant)

    def join(self, tenant: str, waiting: Iterable[str]) -> None:
        """A tenant has something waiting again.

        Args:
          waiting: the others that have.
        """
        self._floor = max(self._floor, min(map(self.level, waiting), default=self._floor))
        self._levels[tenant] = max(self.level(tenant), self._lowest(tenant))
        self._meet(tenant)
        if len(self._levels) > TRIM_AT:
            self._trim()

    def charge(self, tenant: str, num_tokens: int) -> None:
        """A tenant is given tokens of a step."""
        self._charge_all({tenant: num_tokens})

    def count_token(self, tenant: str) -> None:
        """A tenant is given a token, which `charge_counted` charges."""
        counted = self._counted
        counted[tenant] = counted.get(tenant, 0) + 1

    def charge_counted(self) -> None:
        counted, self._counted = self._counted, {}
        self._charge_all(counted)

    def _charge_all(self, num_tokens: Mapping[str, int]) -> None:
        """All at the same time: the order in which they were counted says nothing."""
        self._num_given += sum(num_tokens.values())
        for tenant in sorted(num_tokens):
            more = num_tokens[tenant] / self._weight_of(tenant)
            self._levels[tenant] = self.level(tenant) + more
            self._meet(tenant)

    def find_ahead(self) -> None:
        """Works out who is ahead, for a step; it looks at each tenant that is present."""
        if not self._credit_tokens:
            return
        present = self._present
        while present:
            last = next(iter(present))
            if self._num_given - present[last] <= self._credit_tokens:
                break
            del present[last]
        least = min(present, key=self.level, default=None)
        if least is not None:
            margin = self._credit_tokens / self._weight_of(least) / AHEAD_AT
            self._ahead_above = self.level(least) + margin

    def is_ahead(self, tenant: str) -> bool:
        """Whether a tenant was given a good deal more than another that is present."""
        return self.level(tenant) > self._ahead_above

    def _lowest(self, tenant: str) -> float:
        """Returns where a tenant begins that has saved up all it can: nobody has from before the
        first token."""
        return max(0.0, self._floor - self._credit_tokens / self._weight_of(tenant))

    def _meet(self, tenant: str) -> None:
        if not self._credit_tokens:
            return  # nobody is kept room
        self._present.pop(tenant, None)
        self._present[tenant] = self._num_given

    def _trim(self) -> None:
        """Forgets who would begin there anyway."""
        self._levels = {
            name: level for name, level in self._levels.items() if level > self._lowest(name)
        }


def build_shares(
    config: SchedulerSection, weight_of: Callable[[str], float], max_step_tokens: int
) -> FairShares | None:
    """Returns the shares of a configuration; None where tenants do not count."""
    if config.policy != "fair":
        return None
    credit = config.fair_credit_tokens
    return FairShares(
        weight_of, credit_tokens=CREDIT_STEPS * max_step_tokens if credit is None else credit
    )
