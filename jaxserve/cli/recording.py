"""Recording what a server is asked, where the configuration says so."""

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from jaxserve.config import Config
from jaxserve.engine import Engine
from jaxserve.errors import ConfigError, WorkloadError

if TYPE_CHECKING:
    from jaxserve.measure.workload.record import Recorder

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def recording(config: Config) -> Iterator[Callable[[Engine], None]]:
    """Yields what an engine is handed to before it starts; writes the workload at the end.

    Raises:
      ConfigError: measure.record_path cannot be recorded to.
    """
    section = config.measure
    if section.record_path is None:
        if section.record_content:
            raise ConfigError("measure.record_content needs measure.record_path; set both or none")
        yield lambda engine: None
        return
    from jaxserve.measure.workload.record import Recorder, RecordLimits, check_path

    check_path(section.record_path)  # before the model is loaded
    recorders: list[Recorder] = []

    def attach(engine: Engine) -> None:
        assert section.record_path is not None
        recorder = Recorder(
            section.record_path,
            start_s=engine.now(),
            page_size=config.kv.page_size,
            source=f"recorded by jaxserve serve: {engine.model.name}",
            limits=RecordLimits(
                max_entries=section.record_max_entries, max_bytes=section.record_max_bytes
            ),
            keeps_content=section.record_content,
        )
        recorders.append(recorder)
        engine.add_tap(recorder.note)

    try:
        yield attach
    finally:
        for recorder in recorders:
            _close(recorder)


def _close(recorder: "Recorder") -> None:
    try:
        end = recorder.close()
    except WorkloadError as error:
        logger.error("the recording is not finished: %s", error)
        return
    if end is None:
        logger.info("recorded requests=0")
        return
    dropped = sum(end.counts.values())
    logger.info(
        "recorded requests=%d dropped=%d hash=%s", end.num_entries, dropped, end.content_hash
    )
