#!/usr/bin/env bash
# Two vLLM servers that share one lmkv host service, and a client that asks both the same long question.
#
#     examples/vllm_serve.sh MODEL
#
# The second server never saw the prompt, yet answers from what the first one stored.
set -euo pipefail
MODEL=$1
HERE=$(cd "$(dirname "$0")" && pwd)
LMKV='{"kv_connector":"LMKVConnector","kv_role":"kv_both","kv_connector_extra_config":{"cpu_budget":"1GiB"}}'

for port in 8101 8102; do
  python -m vllm.entrypoints.openai.api_server --model "$MODEL" --served-model-name model --port $port \
    --host 127.0.0.1 --max-model-len 4096 --prefix-caching-hash-algo sha256_cbor --kv-transfer-config "$LMKV" \
    > "${TMPDIR:-/tmp}/vllm-$port.log" 2>&1 &
  trap 'kill $(jobs -p) 2>/dev/null; wait' EXIT
  until curl -sf "http://127.0.0.1:$port/health"; do
    kill -0 $! || { tail -50 "${TMPDIR:-/tmp}/vllm-$port.log"; exit 1; }
    sleep 1
  done
done
python "$HERE/vllm_client.py" http://127.0.0.1:8101 http://127.0.0.1:8102
