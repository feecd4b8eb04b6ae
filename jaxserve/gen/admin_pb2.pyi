import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetServerInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetServerInfoResponse(_message.Message):
    __slots__ = ("version", "jax_version", "platform", "device", "start_time", "config_json", "config_sha256", "state")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    JAX_VERSION_FIELD_NUMBER: _ClassVar[int]
    PLATFORM_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    START_TIME_FIELD_NUMBER: _ClassVar[int]
    CONFIG_JSON_FIELD_NUMBER: _ClassVar[int]
    CONFIG_SHA256_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    version: str
    jax_version: str
    platform: str
    device: str
    start_time: _timestamp_pb2.Timestamp
    config_json: str
    config_sha256: str
    state: str
    def __init__(self, version: _Optional[str] = ..., jax_version: _Optional[str] = ..., platform: _Optional[str] = ..., device: _Optional[str] = ..., start_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., config_json: _Optional[str] = ..., config_sha256: _Optional[str] = ..., state: _Optional[str] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("running_requests", "waiting_requests", "waiting_prompt_tokens", "max_running_requests", "used_kv_tokens", "total_kv_tokens", "kv_cache_usage", "generation_tokens_per_second", "finished_requests")
    RUNNING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    WAITING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    WAITING_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_RUNNING_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    USED_KV_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_KV_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_USAGE_FIELD_NUMBER: _ClassVar[int]
    GENERATION_TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    FINISHED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    running_requests: int
    waiting_requests: int
    waiting_prompt_tokens: int
    max_running_requests: int
    used_kv_tokens: int
    total_kv_tokens: int
    kv_cache_usage: float
    generation_tokens_per_second: float
    finished_requests: int
    def __init__(self, running_requests: _Optional[int] = ..., waiting_requests: _Optional[int] = ..., waiting_prompt_tokens: _Optional[int] = ..., max_running_requests: _Optional[int] = ..., used_kv_tokens: _Optional[int] = ..., total_kv_tokens: _Optional[int] = ..., kv_cache_usage: _Optional[float] = ..., generation_tokens_per_second: _Optional[float] = ..., finished_requests: _Optional[int] = ...) -> None: ...

class GetLoadRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetLoadResponse(_message.Message):
    __slots__ = ("load",)
    LOAD_FIELD_NUMBER: _ClassVar[int]
    load: Load
    def __init__(self, load: _Optional[_Union[Load, _Mapping]] = ...) -> None: ...

class WatchLoadRequest(_message.Message):
    __slots__ = ("interval",)
    INTERVAL_FIELD_NUMBER: _ClassVar[int]
    interval: _duration_pb2.Duration
    def __init__(self, interval: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class WatchLoadResponse(_message.Message):
    __slots__ = ("load",)
    LOAD_FIELD_NUMBER: _ClassVar[int]
    load: Load
    def __init__(self, load: _Optional[_Union[Load, _Mapping]] = ...) -> None: ...

class Bucket(_message.Message):
    __slots__ = ("program", "shape", "steps", "real_tokens", "padded_tokens", "compile_time")
    PROGRAM_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    REAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PADDED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPILE_TIME_FIELD_NUMBER: _ClassVar[int]
    program: str
    shape: str
    steps: int
    real_tokens: int
    padded_tokens: int
    compile_time: _duration_pb2.Duration
    def __init__(self, program: _Optional[str] = ..., shape: _Optional[str] = ..., steps: _Optional[int] = ..., real_tokens: _Optional[int] = ..., padded_tokens: _Optional[int] = ..., compile_time: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class ListBucketsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListBucketsResponse(_message.Message):
    __slots__ = ("buckets",)
    BUCKETS_FIELD_NUMBER: _ClassVar[int]
    buckets: _containers.RepeatedCompositeFieldContainer[Bucket]
    def __init__(self, buckets: _Optional[_Iterable[_Union[Bucket, _Mapping]]] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("grace",)
    GRACE_FIELD_NUMBER: _ClassVar[int]
    grace: _duration_pb2.Duration
    def __init__(self, grace: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("in_flight",)
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    in_flight: int
    def __init__(self, in_flight: _Optional[int] = ...) -> None: ...

class SetLogLevelRequest(_message.Message):
    __slots__ = ("level",)
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    level: str
    def __init__(self, level: _Optional[str] = ...) -> None: ...

class SetLogLevelResponse(_message.Message):
    __slots__ = ("previous_level",)
    PREVIOUS_LEVEL_FIELD_NUMBER: _ClassVar[int]
    previous_level: str
    def __init__(self, previous_level: _Optional[str] = ...) -> None: ...

class ReloadCredentialsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReloadCredentialsResponse(_message.Message):
    __slots__ = ("num_keys", "num_tenants")
    NUM_KEYS_FIELD_NUMBER: _ClassVar[int]
    NUM_TENANTS_FIELD_NUMBER: _ClassVar[int]
    num_keys: int
    num_tenants: int
    def __init__(self, num_keys: _Optional[int] = ..., num_tenants: _Optional[int] = ...) -> None: ...

class FlushPrefixCacheRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FlushPrefixCacheResponse(_message.Message):
    __slots__ = ("freed_pages",)
    FREED_PAGES_FIELD_NUMBER: _ClassVar[int]
    freed_pages: int
    def __init__(self, freed_pages: _Optional[int] = ...) -> None: ...
