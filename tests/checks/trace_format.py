"""The Chrome trace event format, as strictly as it can be read."""

import json

METADATA = {
    "process_name": str,
    "process_labels": str,
    "process_sort_index": int,
    "thread_name": str,
    "thread_sort_index": int,
}


def read_trace(path):
    """The events of ``path``, after it was found to keep every rule."""
    trace = json.loads(
        path.read_bytes(), parse_constant=_refuse, object_pairs_hook=_without_duplicates
    )
    assert set(trace) == {"displayTimeUnit", "otherData", "traceEvents"}
    assert trace["displayTimeUnit"] == "ms"
    threads = {}
    processes = {}
    open_until = {}
    latest = {}
    for event in trace["traceEvents"]:
        thread = event["pid"], event["tid"]
        assert type(event["pid"]) is int
        assert type(event["tid"]) is int
        if event["ph"] == "M":
            assert set(event) == {"ph", "pid", "tid", "name", "ts", "args"}
            (value,) = event["args"].values()
            assert isinstance(value, METADATA[event["name"]])
            if event["name"] == "thread_name":
                assert thread not in threads, "a thread has one name"
                threads[thread] = value
            elif event["name"] == "process_name":
                assert event["pid"] not in processes
                processes[event["pid"]] = value
            continue
        assert event["ph"] == "X", event
        assert set(event) == {"ph", "pid", "tid", "name", "ts", "dur", "args"}
        assert event["pid"] in processes, "named before it is used"
        assert thread in threads, "named before it is used"
        assert event["name"]
        assert event["ts"] >= latest.get(thread, 0.0), "in order of time"
        assert event["dur"] >= 0
        latest[thread] = event["ts"]
        nested = open_until.setdefault(thread, [])
        begin, end = round(event["ts"] * 1e3), round(event["ts"] * 1e3) + round(event["dur"] * 1e3)
        while nested and nested[-1] <= begin:
            nested.pop()
        assert not nested or end <= nested[-1], (
            f"{event} begins inside another slice and ends outside"
        )
        nested.append(end)
    return trace["traceEvents"]


def slices(events, track, pid):
    """The slices of the thread ``track`` of rank ``pid``, without those inside others
    (``"queued"``).
    """
    tids = {
        e["tid"]
        for e in events
        if e["name"] == "thread_name" and e["pid"] == pid and e["args"]["name"] == track
    }
    return [
        e
        for e in events
        if e["ph"] == "X" and e["pid"] == pid and e["tid"] in tids and e["name"] != "queued"
    ]


def tracks(events, pid):
    return [e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] == pid]


def _refuse(constant):
    raise ValueError(f"{constant} is no JSON")


def _without_duplicates(pairs):
    assert len({key for key, _ in pairs}) == len(pairs), f"a key is there twice: {pairs}"
    return dict(pairs)
