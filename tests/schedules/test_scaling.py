import pytest

from lightning_ring.schedules import linear_scaled_lr, sqrt_scaled_lr


def test_linear_rule_gives_goyals_learning_rate():
    assert linear_scaled_lr(0.1, 8192) == pytest.approx(3.2)
    assert linear_scaled_lr(0.1, 256) == 0.1
    assert linear_scaled_lr(0.4, 64, base_batch_size=128) == pytest.approx(0.2)


def test_square_root_rule():
    assert sqrt_scaled_lr(0.001, 1024) == pytest.approx(0.002)
    assert sqrt_scaled_lr(0.001, 512, base_batch_size=2048) == pytest.approx(0.0005)


@pytest.mark.parametrize("rule", [linear_scaled_lr, sqrt_scaled_lr])
@pytest.mark.parametrize(
    "arguments", [(0, 256, 256), (0.1, 0, 256), (0.1, 256, -1), (float("nan"), 256, 256)]
)
def test_what_is_not_positive_is_refused(rule, arguments):
    with pytest.raises(ValueError, match="expected a finite number > 0"):
        rule(*arguments)
