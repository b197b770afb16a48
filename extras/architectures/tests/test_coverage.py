"""Architectures of docs/models.md with gated delta nets."""

import pytest
from test_coverage import WITH_DELTA_NETS, require_exact


@pytest.mark.slow
@pytest.mark.parametrize("model_type", WITH_DELTA_NETS)
def test_architecture_is_exact(model_type, tmp_path, device):
    require_exact(model_type, tmp_path, device)
