"""A pytest plugin for vLLM's own connector tests: where they build one of their connectors, they get LMKVConnector.

Their stand-ins answer every lookup with a number from their settings. Here that number is the answer of a host service
that is not there; all else is the real scheduler side. A test that asks for a synchronous load is skipped, lmkv has
none. Which tests built a connector, and how they ended, goes as JSON to the file that ``LMKV_REPORT`` names.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from itertools import chain
from typing import Any
from unittest import mock

import pytest
from tests.v1.kv_connector.unit import utils
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from lmkv.keys import DIGEST_BYTES
from lmkv.server.client import Answer, Query
from lmkv_vllm.connector import LMKVConnector
from lmkv_vllm.messages import Handshake, Step
from lmkv_vllm.options import Options

STAND_INS = ("MockKVConnector", "ExampleConnector")
BY_NAME = ("SimpleCPUOffloadConnector", "OffloadingConnector")  # in tests of what a configuration leads to
SETTINGS = {"chunk_tokens": 1, "lookup_timeout": 60, "worth_it": False, "weights_id": "upstream"}
SYNC = "asks for a synchronous load"


class Answers:
    """What the scheduler's side needs of a `Host`. tokens: found of every prompt, beyond what vLLM holds itself.

    How much that is shows when vLLM asks for the answer; until then a lookup waits.
    """

    tiers = ("cpu",)
    available = True

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self._local: dict[str, int] = {}
        self._waiting: dict[str, tuple[Query, Future[Answer]]] = {}

    def register(self, sizes: Any, timeout: float = 0, meanings: Any = None) -> None:
        """Nothing to register with."""

    def lookup_later(self, query: Query) -> Future[Answer]:
        answer: Future[Answer] = Future()
        self._waiting[query.owner] = query, answer
        if query.owner in self._local:
            self.reveal(query.owner, self._local[query.owner])
        return answer

    def reveal(self, owner: str, local: int) -> None:
        """vLLM holds ``local`` tokens of a request's prompt."""
        self._local[owner] = local
        if owner in self._waiting:
            query, answer = self._waiting.pop(owner)
            found = (local + self.tokens) // query.chunk_tokens if self.tokens else 0
            answer.set_result(Answer(bytes(min(found, len(query.digests) // DIGEST_BYTES)), "not stored"))

    def release(self, *owners: str) -> None:
        for owner in owners:
            self._local.pop(owner, None)
            self._waiting.pop(owner, None)

    def clear_later(self, scope: bytes) -> None:
        """Nothing is stored."""

    def close(self) -> None:
        """Nothing is open."""


@dataclasses.dataclass
class Recorded(Step):
    """A step with what their stand-in's metadata has: the requests that are new in it or were resumed."""

    requests: list[dict[str, str]] = dataclasses.field(default_factory=list)


class Target(LMKVConnector):
    """LMKVConnector in place of a stand-in, with its constructor's settings understood."""

    built = 0

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        Target.built += 1
        transfer = vllm_config.kv_transfer_config
        theirs = dict(transfer.kv_connector_extra_config)
        tokens = theirs.get("matched_tokens", 0)
        self._answers = Answers(0)
        self.config = utils.MockKVConfig(tokens, theirs.get("is_async", True))
        self._defers = theirs.get("num_defers_before_matching", 0)
        self._asked: dict[str, int] = {}
        transfer.kv_connector_extra_config = dict(SETTINGS)
        with mock.patch.object(Options, "host", return_value=self._answers):
            super().__init__(vllm_config, role, kv_cache_config)
            if role == KVConnectorRole.SCHEDULER:
                groups = tuple(range(len(self.scheduler.plan.groups)))
                shards = range(self.scheduler.plan.shards)
                self.scheduler.meet([Handshake(shard, (8192,) * len(groups), groups, "upstream") for shard in shards])
        transfer.kv_connector_extra_config = theirs

    @property
    def config(self) -> utils.MockKVConfig:
        """The stand-in's settings, which a test may change."""
        return self._config

    @config.setter
    def config(self, config: utils.MockKVConfig) -> None:
        if config.matched_tokens and not config.is_async:
            pytest.skip(SYNC)
        self._config, self._answers.tokens = config, config.matched_tokens

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        asked = self._asked[request.request_id] = self._asked.get(request.request_id, 0) + 1
        if asked <= self._defers:
            return None, False
        self._answers.reveal(request.request_id, num_computed_tokens)
        return super().get_num_new_matched_tokens(request, num_computed_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Recorded:
        step = super().build_connector_meta(scheduler_output)
        cached = scheduler_output.scheduled_cached_reqs
        new = (each.req_id for each in scheduler_output.scheduled_new_reqs)
        resumed = (each for each in cached.req_ids if each in cached.resumed_req_ids)
        requests = [{"req_id": each} for each in chain(new, resumed)]
        return Recorded(step.scope, step.loads, step.saves, step.settle, step.idle, requests)


def by_name(original: Callable[..., Any]) -> Callable[..., Any]:
    """KVTransferConfig's constructor with lmkv's name where a test names one of vLLM's offloading connectors."""

    def retarget(config: dict[str, Any]) -> dict[str, Any]:
        if config.get("kv_connector") in BY_NAME:
            ours = {"kv_connector": "LMKVConnector", "kv_connector_module_path": "lmkv_vllm"}
            return {**config, **ours, "kv_connector_extra_config": {}}
        children = config.get("kv_connector_extra_config", {}).get("connectors")
        if children:
            return {**config, "kv_connector_extra_config": {"connectors": [retarget(each) for each in children]}}
        return config

    def construct(self: Any, *args: Any, **config: Any) -> None:
        original(self, *args, **retarget(config))

    return construct


class Report:
    """Counts the connectors that each test built."""

    def __init__(self) -> None:
        self.found: dict[str, dict[str, Any]] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        before = Target.built
        # Where connectors are told apart by name, the stand-ins must be what they are.
        names = () if "hma" in item.path.name else STAND_INS
        with (
            mock.patch.dict(KVConnectorFactory._registry, {name: lambda: Target for name in names}),
            mock.patch.object(utils, "ExampleConnector", Target),  # what their recording connector records
        ):
            result = yield
        parameters = getattr(item, "callspec", None)
        given = (
            [each for each in parameters.params.values() if isinstance(each, KVTransferConfig)] if parameters else []
        )
        named = sum("LMKVConnector" in repr(each) for each in given)
        self.found.setdefault(item.nodeid, {})["built"] = Target.built - before + named
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        entry = self.found.setdefault(report.nodeid, {})
        if report.when == "call" or report.outcome != "passed":
            entry["outcome"] = report.outcome
            entry["why"] = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr or "")

    def pytest_sessionfinish(self) -> None:
        with open(os.environ["LMKV_REPORT"], "w") as file:
            json.dump(self.found, file, indent=1)


def pytest_configure(config: pytest.Config) -> None:
    KVTransferConfig.__init__ = by_name(KVTransferConfig.__init__)
    config.pluginmanager.register(Report())
