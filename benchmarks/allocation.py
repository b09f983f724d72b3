"""Memory that tensors occupy within a call, on the CPU: by every allocation, so that no page and no cache counts."""

from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile


def peak_bytes(call: Callable[[], object]) -> int:
    """Return the largest sum of tensors allocated within the call, at one moment of it. Earlier ones do not count."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        call()
    waiting, found = list(recorded.profiler.kineto_results.experimental_event_tree()), []
    while waiting:
        event = waiting.pop()
        waiting += event.children
        if event.name == "[memory]":
            found.append((event.start_time_ns, event.extra_fields))
    live, total, most = dict[int, int](), 0, 0
    for _, change in sorted(found, key=lambda pair: pair[0]):
        if change.alloc_size > 0:
            live[change.ptr] = change.alloc_size
            total += change.alloc_size
        else:  # of an earlier tensor, 0
            total -= live.pop(change.ptr, 0)
        most = max(most, total)
    return most
