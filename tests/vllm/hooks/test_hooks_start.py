"""What is refused when an engine starts, what names its chunks, and what several ranks agree on."""

from __future__ import annotations

import copy
from collections import Counter
from contextlib import ExitStack
from dataclasses import replace
from unittest import mock

import pytest
from common import FULL, PROMPT, S
from sim.engine import Engine
from sim.host import Service
from sim.models import MODELS, mamba, setup, vllm_config
from vllm.v1 import kv_cache_interface as specs

from lmkv.errors import ConfigError
from lmkv_vllm import geometry
from lmkv_vllm.messages import Outcome, both

A, B, C = (b"a", 0), (b"b", 0), (b"b", 1)


def plan(**parallel: int) -> geometry.Plan:
    """The plan of a model of full attention, under other settings of parallelism."""
    config = vllm_config(FULL)
    found = setup(FULL, 70, config)
    for name, value in parallel.items():
        setattr(config.parallel_config, name, value)
    return geometry.Plan.of(config, found.scheduler_cache, 8)


# Refusals.


@pytest.mark.parametrize("name", ["decode_context_parallel_size", "prefill_context_parallel_size"])
def test_context_parallelism_is_refused(name: str) -> None:
    assert plan(**{name: 1}).shards == 1
    with pytest.raises(ConfigError, match="context parallelism"):
        plan(**{name: 2})


@pytest.mark.parametrize("eagle", [False, True])
def test_drafters_with_layers_of_their_own_are_refused(eagle: bool) -> None:
    config = vllm_config(FULL)
    cache = setup(FULL, 70, config).scheduler_cache
    config.speculative_config = mock.Mock()
    config.speculative_config.use_eagle.return_value = eagle
    if not eagle:
        assert geometry.Plan.of(config, cache, 8).groups
        return
    with pytest.raises(ConfigError, match="EAGLE"):
        geometry.Plan.of(config, cache, 8)


@pytest.mark.parametrize(
    "name", ["ChunkedLocalAttentionSpec", "RSWASpec", "SinkFullAttentionSpec", "CrossAttentionSpec"]
)
def test_layers_of_another_kind_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="not supported by LMKVConnector"):
        geometry._kind(mock.Mock(spec=getattr(specs, name)))


@pytest.mark.parametrize("mode", ["none", "all"])
def test_states_that_vllm_does_not_keep_at_boundaries_are_refused(mode: str) -> None:
    assert geometry._group(0, mamba()).number == 0
    with pytest.raises(ConfigError, match="mamba_cache_mode"):
        geometry._group(0, mamba(mamba_cache_mode=mode))


def test_ranks_that_do_not_fit_together_are_refused(service: Service) -> None:
    with Engine(MODELS["full tp2"], blocks=70, service=service) as engine:
        one, two = (rank.connector.get_handshake_metadata() for rank in engine.ranks)
        assert (one.shard, two.shard) == (0, 1)
        side = S(engine)
        side.meet([one, two])
        for ranks in ([one], [one, one], [one, two, replace(two, shard=2)]):
            with pytest.raises(ConfigError, match="2 shards expected"):
                side.meet(ranks)
        with pytest.raises(ConfigError, match="lay them out differently"):
            side.meet([one, two, replace(two, where="elsewhere")])


# Names.


def test_another_config_of_the_same_weights_has_other_chunks(service: Service) -> None:
    """Overrides (rope, for one) change what is computed; the name of the weights stays."""
    with Engine(FULL, blocks=70, service=service) as engine:
        scope = S(engine).scope
    config = vllm_config(FULL)
    with Engine(FULL, blocks=70, service=service, config=config) as engine:
        assert S(engine).scope == scope
    config = vllm_config(FULL)
    config.model_config.hf_config = copy.deepcopy(config.model_config.hf_config)
    config.model_config.hf_config.rms_norm_eps = 0.5
    with Engine(FULL, blocks=70, service=service, config=config) as engine:
        assert S(engine).scope != scope


# Several ranks.


def test_only_what_all_ranks_store_counts() -> None:
    assert both((A, B, C), (C, A)) == (A, C)
    one = Outcome(Counter({1: 1, 2: 1}), [], {1: (A, B), 2: (A,)})
    other = Outcome(Counter({1: 1}), [], {1: (B,), 3: (C,)})
    for left, right in ((one, other), (other, one)):
        found = left.aggregate(right)
        assert found.saved == Counter({1: 2, 2: 1})
        assert found.kept == {1: (B,), 2: (A,), 3: (C,)}


def test_replicas_are_written_by_one_rank(service: Service) -> None:
    with Engine(MODELS["mla tp2"], blocks=70, service=service) as engine, ExitStack() as stack:
        hosts = [rank.connector.side.host for rank in engine.ranks]
        calls = [stack.enter_context(mock.patch.object(host, "reserve", wraps=host.reserve)) for host in hosts]
        engine.generate(PROMPT, 1)
        engine.settle()
        assert [call.called for call in calls] == [True, False]
        assert len(service.stored) == 7
