"""The names of metrics are those of vLLM where it has them."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from alignedserve.config.choices import MetricsPrefix
from tests.metrics.deployment import exposed

# Families of vLLM 0.32 (docs.vllm.ai, Production Metrics) that mean something here; counters are without their _total.
# What it has beside them is of its engine alone: LoRA, multimodal caches, speculative decoding, sleep.
OF_VLLM = {
    "num_requests_running": "gauge",
    "num_requests_waiting": "gauge",
    "kv_cache_usage_perc": "gauge",
    "num_preemptions": "counter",
    "prefix_cache_queries": "counter",
    "prefix_cache_hits": "counter",
    "prompt_tokens": "counter",
    "prompt_tokens_cached": "counter",
    "generation_tokens": "counter",
    "request_success": "counter",
    "admission_rejections": "counter",
    "iteration_tokens_total": "histogram",
    "time_to_first_token_seconds": "histogram",
    "inter_token_latency_seconds": "histogram",
    "request_time_per_output_token_seconds": "histogram",
    "e2e_request_latency_seconds": "histogram",
    "request_queue_time_seconds": "histogram",
    "request_prefill_time_seconds": "histogram",
    "request_decode_time_seconds": "histogram",
    "request_inference_time_seconds": "histogram",
    "request_prompt_tokens": "histogram",
    "request_generation_tokens": "histogram",
    "request_max_num_generation_tokens": "histogram",
    "request_prefill_kv_computed_tokens": "histogram",
    "request_params_n": "histogram",
    "request_params_max_tokens": "histogram",
}


def families(prefix: MetricsPrefix) -> dict[str, str]:
    return {family.name: family.type for family in text_string_to_metric_families(exposed(prefix))}


def test_vllm_s_names_and_types_are_served() -> None:
    served = families(MetricsPrefix.VLLM)
    assert {name: served.get(f"vllm:{name}") for name in OF_VLLM} == OF_VLLM


def test_every_series_names_the_model() -> None:
    """A board of vLLM asks for the series of one model. Processes may have several."""
    for family in text_string_to_metric_families(exposed()):
        if family.name.startswith("alignedserve:"):
            assert all(sample.labels.get("model_name") == "demo" for sample in family.samples), family.name
