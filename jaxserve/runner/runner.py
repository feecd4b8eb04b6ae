"""The runner: owns parameters, KV pool, state rows and programs, and turns plans into results."""

import dataclasses
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np

from jaxserve.config import Config
from jaxserve.metrics import Metrics
from jaxserve.model.config import ModelConfig
from jaxserve.model.params import Params
from jaxserve.model.sampling import Variant
from jaxserve.plan import NO_LAPS, Bucket, Chunk, Laps, PageCopy, RowLoad, StepLimits, StepPlan
from jaxserve.request import SamplingParams
from jaxserve.runner import state, steps
from jaxserve.runner.batch import build_output_rows, build_packed, find_plan_bucket
from jaxserve.runner.buckets import VARIANTS, Reach
from jaxserve.runner.in_flight import LaunchedStep
from jaxserve.runner.memory import (
    choose_dtypes,
    find_platform,
    naming_lack_of_memory,
    read_cpu_flags,
)
from jaxserve.runner.placement import place_params
from jaxserve.runner.programs import (
    ProgramKey,
    Programs,
    Progress,
    bucket_name,
    head_params,
    program_keys,
)
from jaxserve.runner.sizing import size_runner
from jaxserve.runner.spec import DtypeName, RunnerSpec

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
        has_copies: bool = False,
    ) -> None:
        """Sizes the pool, compiles every program, and fills the device.

        Args:
          params: the parameters, whose dtype then holds; or what loads them while programs compile.
          cache_dir: root of the persistent compilation cache; None keeps nothing.
          progress: called after each program, on the calling thread.
          reach: compile only what this one request can reach.
          has_copies: plans may copy pages.

        Raises:
          CapacityError: parameters, programs or one full-length sequence do not fit.
          ConfigError: sizes of the configuration that contradict each other or the model.
        """
        dtype, kv_dtype = choose_dtypes(
            config, platform=find_platform(), cpu_flags=read_cpu_flags()
        )
        if not callable(params):
            dtype = params["embedding_VD"].dtype.name
        self._metrics = metrics
        self._forbid_recompile = config.runner.forbid_recompile
        self._programs = Programs(metrics)

        def compile_keys(keys: tuple[ProgramKey, ...]) -> None:
            self._programs.compile_all(
                keys,
                num_threads=config.runner.compile_threads,
                cache_dir=cache_dir,
                progress=progress,
            )

        sizes = size_runner(
            model_config,
            config,
            dtypes=(dtype, kv_dtype),
            programs=self._programs,
            compile_keys=compile_keys,
        )
        self.max_model_tokens = sizes.max_model_tokens
        self._spec, self._scheme = sizes.spec, sizes.scheme
        if reach is not None:
            self._scheme = sizes.scheme.reachable(
                reach, max_step_tokens=config.scheduler.max_step_tokens
            )
        keys = program_keys(self._spec, self._scheme, has_copies=has_copies)
        with ThreadPoolExecutor(1, thread_name_prefix="jaxserve-load") as pool:
            loading = pool.submit(lambda: params(dtype) if callable(params) else params)
            compile_keys(keys)
            loaded = loading.result()
            with naming_lack_of_memory():
                self._params = place_params(loaded) if callable(params) else jax.device_put(params)
        self._run = {(key.kind, key.bucket): self._programs[key] for key in keys}
        self._head = head_params(self._params)
        with naming_lack_of_memory():
            self._kv, self._state, self._hidden_TD = self._run["init", None]()
        self._row_sampling = [SamplingParams()] * self._spec.max_seqs
        self._programs.forbid_compiles()
        self._show_unused()
        logger.info("runner ready dtype=%s kv_dtype=%s programs=%d", dtype, kv_dtype, len(keys))

    @property
    def spec(self) -> RunnerSpec:
        return self._spec

    @property
    def limits(self) -> StepLimits:
        return self._scheme.limits

    @property
    def num_pages(self) -> int:
        return self._spec.num_pages

    def launch(self, plan: StepPlan, laps: Laps = NO_LAPS) -> LaunchedStep:
        """Dispatches row loads, page copies, forward and output; returns without waiting.

        Args:
          laps: told of build and dispatch; the step tells it of the rest.

        Raises:
          RecompileError: something was compiled since warm-up, and the configuration forbids it.
        """
        assert plan.has_work, f"an empty plan cannot be launched: {plan}"
        with jax.transfer_guard("disallow"):
            self._load_rows(plan.row_loads, laps)
            self._copy_pages(plan.copies)
            step = self._run_step(plan, laps)
        step.start_copy()
        self._check_no_recompile()
        laps.lap("dispatch")
        return step

    def _run_step(self, plan: StepPlan, laps: Laps) -> LaunchedStep:
        bucket = find_plan_bucket(plan, self._scheme)
        sampling = [chunk for chunk in plan.chunks if chunk.samples]
        output = self._scheme.find_output(len(sampling), self._find_variant(sampling))
        arrays = (
            build_packed(plan, bucket, self._spec),
            build_output_rows(plan, bucket, output, self._spec),
        )
        laps.lap("build")
        packed_I, rows_3R = jax.device_put(arrays)
        held = self._state
        self._kv, page_table_BP, self._hidden_TD, result = self._run["forward", bucket](
            self._params, self._kv, held.page_table_BP, self._hidden_TD, held.last_token_B, packed_I
        )
        self._state = held = dataclasses.replace(held, page_table_BP=page_table_BP)
        if sampling:
            arguments = (self._head, self._hidden_TD, held.last_token_B, held.sampling, rows_3R)
            run = self._run["output", output]
            if output.variant == "full":
                last_token_B, rows, result = run(*arguments)
                self._state = dataclasses.replace(held, last_token_B=last_token_B, sampling=rows)
            else:
                last_token_B, result = run(*arguments)
                self._state = dataclasses.replace(held, last_token_B=last_token_B)
            self._metrics.output_programs.labels(
                bucket=bucket_name(output), variant=output.variant
            ).inc()
        self._count_step(plan, bucket)
        return LaunchedStep(
            result,
            metrics=self._metrics,
            sequence_ids=tuple(chunk.sequence_id for chunk in sampling),
            bucket=bucket,
            laps=laps,
        )

    def _load_rows(self, loads: Sequence[RowLoad], laps: Laps) -> None:
        if not loads:
            return
        for load in loads:
            self._row_sampling[load.row] = load.sampling
        for packed_LI in state.build_row_loads(loads, self._spec):
            laps.lap("build")
            self._state = self._run["row_load", None](self._state, jax.device_put(packed_LI))
            laps.lap("dispatch")
        for triples_3I in state.build_counts(loads, self._spec):
            laps.lap("build")
            rows = self._state.sampling
            counts_BV = self._run["counts", None](rows.counts_BV, jax.device_put(triples_3I))
            rows = dataclasses.replace(rows, counts_BV=counts_BV)
            self._state = dataclasses.replace(self._state, sampling=rows)
            laps.lap("dispatch")

    def _copy_pages(self, copies: Sequence[PageCopy]) -> None:
        for first in range(0, len(copies), steps.COPY_WIDTH):
            some = copies[first : first + steps.COPY_WIDTH]
            pages_2W = np.zeros((2, steps.COPY_WIDTH), np.int32)
            pages_2W[1] = self._spec.num_pages
            pages_2W[:, : len(some)] = np.array([(c.source, c.target) for c in some]).T
            self._kv = self._run["page_copy", None](self._kv, jax.device_put(pages_2W))
        self._metrics.page_copies.inc(len(copies))

    def _find_variant(self, sampling: Sequence[Chunk]) -> Variant:
        """Returns the least variant that serves every row to sample."""
        wanted = {
            state.find_variant(self._row_sampling[chunk.row], chunk.output_index)
            for chunk in sampling
        }
        return max(wanted, key=VARIANTS.index, default="greedy")

    def _show_unused(self) -> None:
        """Has the metrics show a zero for what never ran."""
        metrics = self._metrics
        for bucket in self._scheme.forwards:
            name = bucket_name(bucket)
            for counter in (
                metrics.steps, metrics.real_tokens, metrics.padded_tokens,
                metrics.step_device_seconds,
            ):  # fmt: skip
                counter.labels(bucket=name)
        for output in self._scheme.outputs:
            metrics.output_programs.labels(bucket=bucket_name(output), variant=output.variant)

    def _count_step(self, plan: StepPlan, bucket: Bucket) -> None:
        metrics, name, real = self._metrics, bucket_name(bucket), plan.num_tokens
        metrics.steps.labels(bucket=name).inc()
        metrics.real_tokens.labels(bucket=name).inc(real)
        metrics.padded_tokens.labels(bucket=name).inc(bucket.num_tokens - real)
        if not self._scheme.is_largest(bucket):
            metrics.bucketed_steps.inc()

    def _check_no_recompile(self) -> None:
        if self._forbid_recompile:
            self._programs.check_no_recompile()
