# The environment of every command on a node of the cluster.
export PATH="$HOME/alignedserve/venv/bin:$PATH"
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH="$HOME/alignedserve/secrets/ray-token"  # Ray's nodes answer only holders of the token
export RAY_USAGE_STATS_ENABLED=0
# For gated models of the hub: printf %s "$HF_TOKEN" > secrets/hf-token, before `ray up`.
if [ -s "$HOME/alignedserve/secrets/hf-token" ]; then HF_TOKEN="$(cat "$HOME/alignedserve/secrets/hf-token")"; export HF_TOKEN; fi
ulimit -n "$(ulimit -Hn)"  # each connection is an open file
export RAY_enable_autoscaler_v2=0  # version 2 never starts the nodes of a `local` provider (tried with Ray 2.60)
export RAY_gcs_rpc_server_reconnect_timeout_s=20  # a node whose head is gone ends: no other head knows its actors
