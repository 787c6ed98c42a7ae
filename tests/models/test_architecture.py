"""What architectures say together: the module kinds that a quantization spec may name."""

from __future__ import annotations

import subprocess
import sys

import pytest

from fp8rl.models.architecture import check_scope
from fp8rl.numerics.core.errors import UserError
from fp8rl.numerics.spec import ALL, QuantSpec
from tests.support.paths import ROOT

SPEC = QuantSpec.preset("fp8_block_pow2")


@pytest.mark.parametrize("scope", [ALL, [], ["o_proj"], ["q_proj", "k_proj", "v_proj", "experts.down_proj"]])
def test_a_scope_may_name_kinds_of_any_known_architecture(scope: object) -> None:
    check_scope(SPEC.override({"scope": scope}))


def test_other_names_and_parts_of_a_fused_product_are_refused() -> None:
    with pytest.raises(UserError, match=r"scope: found \['gate'\], expected names out of .*'gate_proj'"):
        check_scope(SPEC.override({"scope": ["gate"]}))
    with pytest.raises(UserError, match=r"found \['q_proj'\] without the rest of \['q_proj', 'k_proj', 'v_proj'\]"):
        check_scope(SPEC.override({"scope": ["q_proj"]}))


@pytest.mark.slow
def test_knowing_the_architectures_takes_no_library_of_models() -> None:
    asked = "import sys, fp8rl.models.architecture as a; a.architectures(); print('transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", asked], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
