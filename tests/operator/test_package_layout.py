"""What the tree must not hold."""

from pathlib import Path

OPERATOR_ROOT = Path(__file__).parents[2] / "operator"


def test_the_source_root_is_no_package_because_it_would_shadow_pythons_operator_module() -> None:
    assert (OPERATOR_ROOT / "kvasir_operator" / "__init__.py").is_file()
    assert not (OPERATOR_ROOT / "__init__.py").exists()
