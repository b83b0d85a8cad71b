"""The table's file: round trip, refusals that name the field, and five hundred mutations."""

from __future__ import annotations

import copy
import json
import math
import os
import pickle
import random
import stat

import pytest
from latency_cases import FINGERPRINT, LENGTHS, measurements, table

from sb_lightning.latency import Fingerprint, LatencyTable, Measurements
from sb_lightning.latency.schema import encode, parse, unparse


@pytest.fixture
def path(tmp_path):
    target = tmp_path / "table.json"
    table(noise=0.2, seed=1, profile={"spread": [0.01, 0.02], "note": "ä"}).save(target)
    return target


def predictions(t):
    return t.predict_many([n + 1 for n in LENGTHS] * 3, [1] * 6 + [5] * 6 + [999] * 6).tolist()


def test_round_trip(path):
    first = table(noise=0.2, seed=1, profile={"spread": [0.01, 0.02], "note": "ä"})
    again = LatencyTable.load(path)
    assert again.to_dict() == first.to_dict() == LatencyTable.from_dict(first.to_dict()).to_dict()
    assert again.profile == {"spread": [0.01, 0.02], "note": "ä"}
    assert predictions(again) == predictions(first)
    assert again.label == "measured (A processor, 1 thread x 2, float32)"
    assert json.loads(path.read_text())["version"] == 1
    # Measured values are kept, not corrected ones: saving a loaded table changes nothing.
    content = path.read_bytes()
    again.save(path)
    assert path.read_bytes() == content


def test_copies_and_pickles(path):
    first = LatencyTable.load(path)
    first.label = "cache/table.json"
    for again in (copy.deepcopy(first), pickle.loads(pickle.dumps(first))):
        assert type(again) is LatencyTable
        assert again.label == "cache/table.json"
        assert "cache/table.json" in repr(again)
        assert predictions(again) == predictions(first)


def test_saving_replaces_the_file_whole_or_not_at_all(path, monkeypatch):
    content = path.read_bytes()
    other = table(noise=0.1, seed=2)
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
        with pytest.raises(OSError, match="disk full"):
            other.save(path)
    assert path.read_bytes() == content
    assert [entry.name for entry in path.parent.iterdir()] == ["table.json"]
    other.save(path)
    assert LatencyTable.load(path).to_dict() == other.to_dict()
    assert stat.S_IMODE(path.stat().st_mode) & 0o400


def change(document, where, value):
    *parents, key = where
    for parent in parents:
        document = document[parent]
    if value is KeyError:
        del document[key]
    else:
        document[key] = value


REFUSED = [
    (("version",), 2, "version is 2"),
    (("version",), True, "version is True"),
    (("version",), KeyError, "version is None"),
    (("format",), "other", "format is 'other'"),
    (("lengths",), KeyError, "has no lengths"),
    (("dense",), KeyError, "has no dense"),
    (("outside", "backward_ms"), KeyError, "outside has no backward_ms"),
    (("attention", 2, "budgets"), KeyError, r"attention\[2\] has no budgets"),
    (("extra",), 1, "unknown key 'extra'"),
    (("rest", "extra"), 1, "rest has an unknown key 'extra'"),
    (("lengths", 1), 100, r"lengths\[1\] is 100 after 100"),
    (("lengths", 1), 256.0, r"lengths\[1\] is 256.0, not an integer"),
    (("lengths", 5), 2**31, r"lengths\[5\] is 2147483648"),
    (("lengths",), [], "lengths is empty"),
    (("lengths",), {}, "lengths is {}, not a list"),
    (("lengths",), [1] * 600, "lengths has 600 values"),
    (("attention",), [], "attention has 0 rows for 6 lengths"),
    (("attention", 1), [], r"attention\[1\] is \[\], not an object"),
    (("attention", 5, "budgets", 0), 3, r"attention\[5\].budgets\[1\] is 2 after 3"),
    (("attention", 5, "budgets", 7), 128, r"attention\[5\].budgets\[7\] is 128"),
    (("attention", 5, "forward_ms", 0), -1.0, r"attention\[5\].forward_ms\[0\] is -1.0"),
    (("attention", 5, "forward_ms"), [1.0], r"attention\[5\].forward_ms has 1 values where 8 are needed"),
    (("dense", "forward_ms", 3), 0.0, r"dense.forward_ms\[3\] is 0.0"),
    (("dense", "forward_ms", 3), 1e-10, r"dense.forward_ms\[3\] is 1e-10, which is not within"),
    (("dense", "forward_ms", 3), 1e13, r"dense.forward_ms\[3\] is 10000000000000.0"),
    (("dense", "forward_ms", 3), math.nan, r"dense.forward_ms\[3\] is nan"),
    (("dense", "forward_ms", 3), math.inf, r"dense.forward_ms\[3\] is inf"),
    (("dense", "forward_ms", 3), 10**400, r"dense.forward_ms\[3\] is 1000"),
    (("dense", "forward_ms", 3), 10**5000, r"an? int too large to print"),
    (("dense", "forward_ms", 3), True, r"dense.forward_ms\[3\] is True, not a number"),
    (("dense", "forward_ms", 3), "1", r"dense.forward_ms\[3\] is '1', not a number"),
    (("rest", "forward_ms", 3), None, r"rest.forward_ms\[3\] is None"),
    (("rest", "forward_ms"), 3.0, "rest.forward_ms is 3.0, not a list"),
    (("micro_batch_ms",), -1.0, "micro_batch_ms is -1.0"),
    (("fingerprint",), None, "fingerprint is None"),
    (("fingerprint", "threads"), KeyError, "fingerprint has no threads"),
    (("fingerprint", "threads"), True, "fingerprint.threads is True, not an integer"),
    (("fingerprint", "threads"), 1.5, "fingerprint.threads is 1.5"),
    (("fingerprint", "block_size"), 0, "fingerprint.block_size is 0"),
    (("fingerprint", "layers"), -1, "fingerprint.layers is -1"),
    (("fingerprint", "device"), 7, "fingerprint.device is 7, not a text"),
    (("profile",), [], r"profile is \[\], not an object"),
]


@pytest.mark.parametrize(("where", "value", "text"), REFUSED, ids=range(len(REFUSED)))
def test_refusals_name_the_field(where, value, text):
    document = table().to_dict()
    change(document, where, value)
    with pytest.raises(ValueError, match=text) as error:
        LatencyTable.from_dict(document)
    assert "To fix it" in str(error.value)


def test_no_layers_at_all_are_refused():
    document = table().to_dict()
    document["fingerprint"].update(layers=0, dense_layers=0)
    with pytest.raises(ValueError, match=r"fingerprint.layers is 0"):
        LatencyTable.from_dict(document)


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ('"version": 1,', '"version": 1, "version": 1,', "version occurs twice"),
        ('"threads": 1,', '"threads": 1, "threads": 4,', "threads occurs twice"),
        ('"micro_batch_ms": 0.25', '"micro_batch_ms": NaN', "holds the number NaN"),
        ('"micro_batch_ms": 0.25', '"micro_batch_ms": 1e999', "micro_batch_ms is not finite"),
        ('"micro_batch_ms": 0.25', '"micro_batch_ms": 0.26', "digest does not belong"),
        ('"micro_batch_ms": 0.25', '"micro_batch_ms": ' + "[" * 100000, "is not JSON"),
        ('"micro_batch_ms": 0.25', '"micro_batch_ms": ' + "1" * 5000, "a number of 5000 digits"),
        ('"note": "', '"note": "\\ud800', "digest does not belong"),
    ],
)
def test_refused_texts(path, old, new, text):
    content = path.read_text()
    assert old in content
    path.write_text(content.replace(old, new))
    with pytest.raises(ValueError, match=text) as error:
        LatencyTable.load(path)
    assert str(path) in str(error.value)


def test_edited_by_hand_without_a_digest(path):
    document = json.loads(path.read_text())
    del document["digest"]
    document["micro_batch_ms"] = 2
    path.write_text(json.dumps(document))
    assert LatencyTable.load(path).fixed_ms == 2.0


def test_every_truncation_is_refused(path):
    content = path.read_bytes()
    for size in [*range(0, len(content) - 2, 97), len(content) - 3]:
        path.write_bytes(content[:size])
        with pytest.raises(ValueError, match=r"table.json: "):
            LatencyTable.load(path)


def test_no_such_file(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"absent.json"):
        LatencyTable.load(tmp_path / "absent.json")


def damaged_bytes(content, generator):
    content = bytearray(content)
    for _ in range(generator.choice([1, 1, 2, 20])):
        place = generator.randrange(len(content))
        kind = generator.randrange(4)
        if kind == 0:
            content[place] = generator.randrange(256)
        elif kind == 1:
            content[place] ^= 1 << generator.randrange(8)
        elif kind == 2:
            del content[place : place + generator.randrange(1, 40)]
        else:
            start = generator.randrange(len(content))
            content[place:place] = content[start : start + generator.randrange(1, 40)]
    return bytes(content)


NONSENSE = [
    None, True, -1, 0, 1, 10**30, -0.0, 1e-300, 1e300, 0.5, "", "1", [], {}, [[]], [1], {"a": 1}, 2**31, 3.0,
]  # fmt: skip


def damaged_structure(document, generator):
    for _ in range(generator.choice([1, 1, 2, 5])):
        node, depth = document, generator.randrange(4)
        while isinstance(node, dict | list) and node:
            keys = list(node) if isinstance(node, dict) else list(range(len(node)))
            key = generator.choice(keys)
            if depth == 0 or not isinstance(node[key], dict | list) or not node[key]:
                break
            node, depth = node[key], depth - 1
        else:
            continue
        kind = generator.randrange(4)
        if kind == 0:
            node[key] = copy.deepcopy(generator.choice(NONSENSE))
        elif kind == 1:
            del node[key]
        elif kind == 2 and isinstance(node, list):
            node.insert(key, copy.deepcopy(node[key]))
        elif kind == 2:
            node[str(key) + "_"] = node.pop(key)
        elif isinstance(node, list):
            generator.shuffle(node)
        elif isinstance(node[key], int | float):
            node[key] = node[key] * generator.choice([-1, 0.5, 2, 1e20])
    return document


def in_contract(t, document):
    """Whether a loaded table holds the file's own numbers, each within its range, and predicts in order."""
    body = {"profile": {}, **{key: value for key, value in document.items() if key != "digest"}}
    assert t.to_dict() == body
    m = t.measurements
    assert m.lengths == sorted(set(m.lengths))
    assert all(0 < n < 2**31 for n in m.lengths)
    for curve in (*m.sparse, m.dense, m.rest, m.outside):
        for times in curve:
            assert all(type(ms) is float and 1e-9 <= ms <= 1e9 for ms in times)
    values = [t.predict(n, k) for n in (50, 700, 9000) for k in (1, 3, 1000)]
    assert all(0 < value < math.inf for value in values)
    assert values[:3] == sorted(values[:3])


def test_damaged_bytes_never_crash_and_never_load_as_something_else(path):
    content, want = path.read_bytes(), LatencyTable.load(path).to_dict()
    generator, loaded, messages = random.Random(0), 0, []
    for number in range(500):
        damaged = damaged_bytes(content, generator)
        path.write_bytes(damaged)
        try:
            t = LatencyTable.load(path)
        except ValueError as error:
            messages.append(str(error))
            continue
        # The digest leaves only what JSON does not see: white space, other spellings of the same text.
        assert t.to_dict() == want, number
        loaded += 1
    assert loaded < 50
    assert all("To fix it" in message for message in messages)


def test_damaged_structure_never_crashes_and_never_loads_out_of_contract(path):
    document = json.loads(path.read_text())
    del document["digest"]
    generator, loaded, messages = random.Random(1), 0, []
    for _ in range(500):
        damaged = damaged_structure(copy.deepcopy(document), generator)
        # With a digest that fits, as by a program that writes nonsense.
        path.write_text(json.dumps(damaged) if "version" not in damaged else encode_any(damaged))
        try:
            t = LatencyTable.load(path)
        except ValueError as error:
            messages.append(str(error))
            continue
        in_contract(t, damaged)
        loaded += 1
    assert 20 < loaded < 480
    assert all("To fix it" in message for message in messages)


def encode_any(document):
    try:
        return encode(document)
    except KeyError:
        return json.dumps(document)


def test_measurements_that_do_not_fit_the_fingerprint():
    with pytest.raises(ValueError, match=r"measurements.layers is 5, fingerprint.layers 3"):
        LatencyTable(measurements(layers=5), Fingerprint(**FINGERPRINT))
    with pytest.raises(ValueError, match=r"micro_batch_ms is nan"):
        LatencyTable(measurements(fixed_ms=math.nan), Fingerprint(**FINGERPRINT))


def test_parse_returns_what_unparse_wrote():
    parts = parse(table().to_dict())
    assert isinstance(parts.measurements, Measurements)
    assert parse(unparse(parts)) == parts
