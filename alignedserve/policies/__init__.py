"""Custom policies: classes with one method, in a Python file that `--policy FILE` names, or in a package.

kinds.py   what a policy is told, and the classes that one is written as, one for each decision
source.py  the file or the package, and the classes in it
guard.py   asks a policy; the default decides where it raises, returns nonsense or is slow
"""

from alignedserve.policies.kinds import AdmissionPolicy as AdmissionPolicy
from alignedserve.policies.kinds import LoadAhead as LoadAhead
from alignedserve.policies.kinds import NewRequest as NewRequest
from alignedserve.policies.kinds import OrderPolicy as OrderPolicy
from alignedserve.policies.kinds import PlacementPolicy as PlacementPolicy
from alignedserve.policies.kinds import PredictorPolicy as PredictorPolicy
from alignedserve.policies.kinds import RequestInLine as RequestInLine
from alignedserve.policies.kinds import WorkerChoice as WorkerChoice
