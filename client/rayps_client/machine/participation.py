"""Whether a client takes part now: its hours, its power supply, and its limits on traffic and memory."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Sequence

from rayps_client.errors import ConfigError
from rayps_client.machine.limits import MEGABYTE, DailyTraffic, memory_refusal, used_memory
from rayps_client.machine.schedule import Hours, Supply, minutes_until, read_supplies, why_away

_LOOK_SECONDS = 60.0  # longest pause between two requests of a client that is away, to learn whether the job has ended


class Participation:
    """The conditions under which a client takes part: `rayps_client.process.Conditions`."""

    def __init__(
        self,
        hours: Sequence[Hours],
        on_charge: bool,
        traffic: DailyTraffic,
        memory: int | None = None,
        *,
        clock: Callable[[], datetime.datetime] = datetime.datetime.now,
        supplies: Callable[[], list[Supply]] = read_supplies,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`memory`: the most bytes that the process may have; None means that there is no limit."""
        self._hours, self._on_charge, self._traffic, self._memory = hours, on_charge, traffic, memory
        self._clock, self._supplies, self._sleep = clock, supplies, sleep
        self._warned = False

    def away(self) -> str | None:
        """Return why the client does not take part now, or None if it does."""
        why = why_away(self._hours, self._minute(), self._supplies() if self._on_charge else None)
        return why or self._traffic.refusal()

    def pause(self) -> None:
        """Wait for at most a minute, or until the client's hours begin."""
        left = minutes_until(self._hours, self._minute()) * 60
        self._sleep(min(left or _LOOK_SECONDS, _LOOK_SECONDS))

    def admit(self, bytes_of_parameters: int, bytes_of_round: int | None = None) -> str | None:
        """Return why a round with parameters of this size is too much for today, or None.

        `bytes_of_round`: what the client receives and sends in it; None: not known yet.

        Raises:
            ConfigError: a round takes more memory, or more traffic a day, than the client may use.
        """
        if self._memory is not None:
            refused = memory_refusal(self._memory, used_memory()[0], bytes_of_parameters)
            if refused is not None:
                raise ConfigError(refused, field="memory")
        return None if bytes_of_round is None else self._traffic.admit(bytes_of_round)

    def trained(self) -> str | None:
        """Return a warning, once, if the process has had more memory than it may have."""
        most = used_memory()[1]
        if self._memory is None or most <= self._memory or self._warned:
            return None
        self._warned = True
        return (
            f"training has taken {most / MEGABYTE:.0f} MB of memory, more than the {self._memory / MEGABYTE:.0f} MB of "
            "--memory: lower batch_size in the job's strategy, or raise --memory"
        )

    def _minute(self) -> float:
        now = self._clock()
        return now.hour * 60 + now.minute + now.second / 60
