"""One rank of the sim: its KV memory, the worker's side of the connector, and a forward pass that writes bytes."""

from __future__ import annotations

import itertools
import pickle
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.utils.math_utils import cdiv
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec, MambaSpec, SlidingWindowSpec, create_kv_cache_views
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from sim.models import Setup
from sim.truth import Bytes, Chain


def views(cache: KVCacheConfig, specs: dict[str, KVCacheSpec], kernel_block: int | None = None) -> dict[str, Any]:
    """The tensors vLLM registers, one a layer, all on one allocation."""
    raw = torch.full((max(tensor.size for tensor in cache.kv_cache_tensors),), 0x5A, dtype=torch.int8)
    layout = KVCacheLayout[cache.kv_cache_layout or "LBHNC"]
    found: dict[str, Any] = {}
    for tensor in cache.kv_cache_tensors:
        made = create_kv_cache_views(raw, specs[tensor.layers[0]], cache.num_blocks, layout, tensor, kernel_block)
        found.update(zip(tensor.layers, made, strict=True))
    return found


def as_bytes(tensor: torch.Tensor) -> Bytes:
    """The same memory as uint8 [blocks, heads, states, content bytes]."""
    array: Bytes = tensor.view(torch.uint8).numpy()
    return array


@dataclass
class Row:
    """A request in the runner's batch: block ids by group, tokens computed, its chain of tokens."""

    tables: list[list[int]]
    chain: Chain
    state_at: int | None = None


class Rank:
    """Tensors, connector and block tables of one worker. Ranks hold different bytes unless they are replicas."""

    def __init__(self, setup: Setup, number: int) -> None:
        self.setup, self.number, self.cache = setup, number, setup.caches[number]
        self.replica_of = number // max(1, self.cache.kv_tp_replicas)
        self.connector: Any = KVConnectorFactory.create_connector(
            config=setup.config, role=KVConnectorRole.WORKER, kv_cache_config=self.cache
        )
        specs = setup.specs
        self.tensors = views(self.cache, specs)
        self.arrays = {name: as_bytes(tensor) for name, tensor in self.tensors.items()}
        self.layers: list[list[tuple[int, Bytes, KVCacheSpec]]] = [
            [
                (100 * self.replica_of + int(name.split(".")[2]), self.arrays[name], specs[name])
                for name in group.layer_names
            ]
            for group in self.cache.kv_cache_groups
        ]
        self.rows: dict[str, Row] = {}
        self.late: list[tuple[int, int]] = []
        self.connector.register_kv_caches(self.tensors)

    def poison(self, blocks: set[int]) -> None:
        """Blocks that are handed out hold garbage."""
        ids = sorted(blocks)
        for array in self.arrays.values():
            array[ids] = 0xBB

    def zero(self, blocks: list[int] | None) -> None:
        for array in self.arrays.values():
            array[blocks or []] = 0

    def copy(self, output: SchedulerOutput, fresh: set[int]) -> None:
        """vLLM's copies of partly matched blocks.

        It makes them before the forward even where the source is only computed in it (with `prefix_match_unit`), which
        copies garbage. That is not what is tested here, so those come behind the writes.
        """
        self.late = []
        for each in output.kv_cache_block_copies or ():
            if each.src_block_id in fresh:
                self.late.append((each.src_block_id, each.dst_block_id))
            for array in self.arrays.values():
                array[each.dst_block_id] = array[each.src_block_id]

    def copy_late(self, computed: dict[str, int]) -> None:
        for (source, target), (name, row) in itertools.product(self.late, self.rows.items()):
            for table, layers in zip(row.tables, self.layers, strict=True):
                if target in table and name in computed:
                    slots = computed[name] - table.index(target) * layers[0][2].block_size
                    for _, array, _ in layers:
                        array[target, :, :slots] = array[source, :, :slots]

    # Block tables, as the model runner keeps them.

    def update(self, output: SchedulerOutput, chains: dict[str, Chain]) -> dict[str, int]:
        """Keep the tables; returns tokens computed before this step by request."""
        for request_id in output.finished_req_ids:
            self.rows.pop(request_id, None)
        for request_id in output.preempted_req_ids or ():
            if request_id in self.rows:
                self.rows[request_id].state_at = None
        computed: dict[str, int] = {}
        for new in output.scheduled_new_reqs:
            self.rows[new.req_id] = Row([list(ids) for ids in new.block_ids], chains[new.req_id])
            computed[new.req_id] = new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        for i, request_id in enumerate(cached.req_ids):
            computed[request_id] = cached.num_computed_tokens[i]
            given = cached.new_block_ids[i]
            if request_id in cached.resumed_req_ids:
                assert given is not None
                self.rows[request_id] = Row([list(ids) for ids in given], chains[request_id])
            else:
                row = self.rows[request_id]
                row.chain = chains[request_id]
                for table, ids in zip(row.tables, given or [()] * len(row.tables), strict=True):
                    table.extend(ids)
        return computed

    def carry_states(self, output: SchedulerOutput, computed: dict[str, int]) -> None:
        """Recurrent layers: the state moves on to the block this step ends in (vLLM's preprocess_mamba)."""
        for g, layers in enumerate(self.layers):
            if not isinstance(layers[0][2], MambaSpec):
                continue
            size = layers[0][2].block_size
            for request_id, count in output.num_scheduled_tokens.items():
                row, before = self.rows[request_id], computed[request_id]
                source = (before - 1) // size if row.state_at is None else row.state_at
                target = cdiv(before + count, size) - 1
                if source not in {-1, target}:
                    for _, array, _ in layers:
                        array[row.tables[g][target]] = array[row.tables[g][source]]
        for request_id, count in output.num_scheduled_tokens.items():
            spec = next((layers[0][2] for layers in self.layers if isinstance(layers[0][2], MambaSpec)), None)
            if spec is not None:
                self.rows[request_id].state_at = cdiv(computed[request_id] + count, spec.block_size) - 1

    def forward(self, output: SchedulerOutput, computed: dict[str, int]) -> None:
        """Write what this step computes, then check all that it reads."""
        for request_id, count in output.num_scheduled_tokens.items():
            for g in range(len(self.layers)):
                self._write(self.rows[request_id], g, computed[request_id], count)
        self.copy_late(computed)
        for request_id, count in output.num_scheduled_tokens.items():
            for g in range(len(self.layers)):
                self._check(request_id, g, computed[request_id])
                self._advance(self.rows[request_id], g, computed[request_id] + count)

    def _places(self, row: Row, group: int, first: int, stop: int, size: int) -> tuple[Any, Any]:
        tokens = np.arange(first, stop)
        return np.array(row.tables[group])[tokens // size], tokens % size

    def _write(self, row: Row, group: int, first: int, count: int) -> None:
        for layer, array, spec in self.layers[group]:
            if not isinstance(spec, MambaSpec):
                blocks, slots = self._places(row, group, first, first + count, spec.block_size)
                assert blocks.all(), "a forward writes to the null block"
                array[blocks, :, slots, :] = expected(row.chain, layer, array, first, first + count)

    def _check(self, request_id: str, group: int, before: int) -> None:
        row = self.rows[request_id]
        for layer, array, spec in self.layers[group]:
            what = f"{request_id} rank {self.number} group {group} layer {layer}"
            if isinstance(spec, MambaSpec):
                block = row.tables[group][row.state_at or 0]
                if before:
                    right = state(row.chain, layer, array, before)
                    assert (array[block].ravel() == right).all(), f"{what}: wrong state of {before} tokens in {block}"
                continue
            window = spec.sliding_window if isinstance(spec, SlidingWindowSpec) else before + 1
            first = max(0, before - window + 1)
            blocks, slots = self._places(row, group, first, before, spec.block_size)
            assert blocks.all(), f"{what}: reads the null block"
            same = (array[blocks, :, slots, :] == expected(row.chain, layer, array, first, before)).all(axis=(1, 2))
            if not same.all():
                at = first + int(np.flatnonzero(~same)[0])
                raise AssertionError(f"{what}: wrong bytes of token {at} (of {before}) in block {blocks[at - first]}")

    def _advance(self, row: Row, group: int, tokens: int) -> None:
        for layer, array, spec in self.layers[group]:
            if isinstance(spec, MambaSpec):
                array[row.tables[group][row.state_at or 0]] = state(row.chain, layer, array, tokens).reshape(
                    array.shape[1:]
                )

    # What the model runner does around it.

    def begin(self, output: SchedulerOutput) -> None:
        """Metadata comes in, as another process would get it; then the first hook."""
        output.kv_connector_metadata = pickle.loads(pickle.dumps(output.kv_connector_metadata))
        self.connector.handle_preemptions(output.kv_connector_metadata)

    def bind(self, output: SchedulerOutput) -> None:
        assert not output.has_sync_kv_loads
        self.connector.bind_connector_metadata(output.kv_connector_metadata)

    def finish(self, output: SchedulerOutput) -> KVConnectorOutput:
        """The hooks behind the forward, in vLLM's order."""
        connector = self.connector
        connector.start_load_kv(SimpleNamespace(attn_metadata=None))
        connector.wait_for_save()
        results = connector.get_transfer_results(output.finished_req_ids)
        found = KVConnectorOutput(
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            invalid_block_ids=connector.get_block_ids_with_load_errors(),
            kv_connector_stats=connector.get_kv_connector_stats(),
            kv_cache_events=connector.get_kv_connector_kv_cache_events(),
            kv_connector_worker_meta=pickle.loads(pickle.dumps(connector.build_connector_worker_meta())),
        )
        connector.clear_connector_metadata()
        return found


def expected(chain: Chain, layer: int, array: Bytes, first: int, stop: int) -> Bytes:
    """[tokens, heads, content]: attention's bytes of tokens [first, stop)."""
    heads, content = array.shape[1], array.shape[3]
    return chain.after(layer, heads * content)[first + 1 : stop + 1].reshape(-1, heads, content)


def state(chain: Chain, layer: int, array: Bytes, tokens: int) -> Bytes:
    """The state after ``tokens`` tokens, flat."""
    return chain.after(layer, int(np.prod(array.shape[1:])))[tokens]


def no_forward(found: KVConnectorOutput) -> ModelRunnerOutput:
    return ModelRunnerOutput.with_kv_conn_output_only(found)
