from alignedserve.api.deployment import Deployment as Deployment
from alignedserve.api.llm import LLM as LLM
from alignedserve.api.llm import SamplingParams as SamplingParams
from alignedserve.api.llm import Slo as Slo
from alignedserve.api.outputs import CompletionOutput as CompletionOutput
from alignedserve.api.outputs import RequestOutput as RequestOutput
from alignedserve.lab.api.simulating import System as System
from alignedserve.lab.api.simulating import compare as compare
from alignedserve.lab.api.simulating import simulate as simulate

LAB: str
NO_LAB: str
