"""Gradients that somebody keeps are not overwritten by the next backward; where nobody does,
there is no copy.
"""

import weakref

import torch

from tests.checks.gradients.nets import (
    assert_same,
    batches,
    fresh_gradients,
    make,
    mine,
    reference_mean,
)


def _memory(tensor):
    return tensor.untyped_storage().data_ptr()


KEEP = {
    "the tensor": lambda grad: grad,
    "an alias": lambda grad: grad.detach(),
    "a slice": lambda grad: grad.view(-1)[1:],
    "numpy": lambda grad: grad.numpy(),
    "autograd": lambda grad: grad * torch.ones_like(grad, requires_grad=True),
    "its storage": lambda grad: grad.untyped_storage(),
}


def check_gradients_that_are_kept_stay():
    for name, keep in KEEP.items():
        net, reference, reducer, _, _ = make()
        kept, expected = [], []
        for step in range(4):
            xs = batches(step)
            with fresh_gradients(net, reference, set_to_none=True), reducer.backward():
                net(mine(xs)).backward()
            reference_mean(reference, xs)
            assert_same(net, reference)
            if step < 2:
                grad = net.layers[3].weight.grad
                kept.append((keep(grad), grad.data_ptr()))
                expected.append(grad.clone())
                del grad
        for (one, _), value in zip(kept, expected, strict=True):
            if name == "autograd":
                (again,) = torch.autograd.grad(one.sum(), one.grad_fn.next_functions[1][0].variable)
                torch.testing.assert_close(again, value, rtol=0, atol=0)
            elif name != "its storage":
                torch.testing.assert_close(
                    torch.as_tensor(one).reshape(-1),
                    value.reshape(-1)[1:] if name == "a slice" else value.reshape(-1),
                )


def check_without_a_holder_gradients_are_views_of_one_buffer():
    for set_to_none in (True, False):
        net, _, reducer, _, _ = make()
        for step in range(5):
            if step == 2:
                places = {_memory(param.grad) for param in net.parameters()}
            with fresh_gradients(net, set_to_none=set_to_none), reducer.backward():
                net(mine(batches(step))).backward()
        assert len(places) == len(reducer.buckets) < 12
        assert {_memory(param.grad) for param in net.parameters()} == places
        assert not any(bucket.copies for bucket in reducer.buckets)


def check_a_weak_reference_ends_with_its_gradient():
    net, _, reducer, _, _ = make()
    for step in range(3):
        with fresh_gradients(net), reducer.backward():
            net(mine(batches(step))).backward()
        if step == 1:
            seen = weakref.ref(net.layers[0].weight.grad)
    assert seen() is None
