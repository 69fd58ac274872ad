//! Layouts and redistributions measured on PyTorch; `tests/golden/README.md` tells how.

use ir::placement::{CommCost, Mesh, Placement, ReduceOp, Sharding, apply_steps, fsdp, reshard};
use serde_json::Value;

fn cases(file: &str) -> Vec<Value> {
    let path = format!("{}/../tests/golden/{file}", env!("CARGO_MANIFEST_DIR"));
    let text = std::fs::read_to_string(&path).unwrap_or_else(|it| panic!("{path}: {it}"));
    text.lines().map(|it| serde_json::from_str(it).unwrap()).collect()
}

fn numbers(value: &Value) -> Vec<u64> {
    value.as_array().unwrap().iter().map(|it| it.as_u64().unwrap()).collect()
}

fn mesh_of(case: &Value) -> Mesh {
    let sizes = numbers(&case["mesh"]);
    let names: Vec<String> = match case["mesh_names"].as_array() {
        Some(names) => names.iter().map(|it| it.as_str().unwrap().to_string()).collect(),
        None => (0..sizes.len()).map(|it| format!("m{it}")).collect(),
    };
    let axes: Vec<(&str, u32)> =
        names.iter().zip(sizes).map(|(name, size)| (name.as_str(), size as u32)).collect();
    Mesh::new(&axes)
}

fn placement(value: &Value) -> Placement {
    let dim = value["dim"].as_u64().unwrap_or(0) as u8;
    match value["t"].as_str().unwrap() {
        "R" => Placement::Replicate,
        "S" => Placement::Shard { dim },
        "SS" => Placement::StridedShard { dim, split: value["sf"].as_u64().unwrap() as u32 },
        "P" => {
            let op = value["op"].as_str().unwrap();
            Placement::Partial(ReduceOp::ALL.into_iter().find(|it| it.name() == op).unwrap())
        }
        other => panic!("unknown placement {other}"),
    }
}

fn placements(value: &Value) -> Vec<Placement> {
    value.as_array().unwrap().iter().map(placement).collect()
}

#[track_caller]
fn check_ranks(case: &Value, sharding: &Sharding, mesh: &Mesh) {
    let id = &case["id"];
    let shape = numbers(&case["shape"]);
    let field = match case["nested"].as_str().unwrap() {
        "differs" => "nested_index",
        _ => "index",
    };
    for rank in case["ranks"].as_array().unwrap() {
        let coord = mesh.coord_of(rank["rank"].as_u64().unwrap());
        let golden_coord: Vec<u32> =
            numbers(&rank["coord"]).into_iter().map(|it| it as u32).collect();
        assert_eq!(coord.as_slice(), golden_coord, "{id}");
        for (dim, layout) in sharding.dims.iter().enumerate() {
            let size = shape[dim];
            let ours = super::rows(layout, size, mesh, &coord);
            let golden = match &rank[field][dim.to_string()] {
                Value::Null => (0..size).collect(),
                held => numbers(held),
            };
            assert_eq!(ours, golden, "{id}, dim {dim} at {coord:?}");
            let extent = layout.extent(size, mesh, &coord);
            assert_eq!(extent, golden.len() as u64, "{id}, dim {dim} at {coord:?}");
            if field == "index" {
                assert_eq!(extent, rank["local_shape"][dim].as_u64().unwrap(), "{id}");
                // Where PyTorch's label and its FSDP disagree, so do its offsets and its data.
                if case["consistent"] == true {
                    let offset = rank["torch_offset"][dim].as_u64().unwrap();
                    assert_eq!(layout.start(size, mesh, &coord), offset, "{id}, dim {dim}");
                }
            }
        }
    }
}

#[test]
fn layouts_agree_with_torch_index_by_index() {
    let mut counts = [0; 3];
    for case in cases("placements.jsonl") {
        let mesh = mesh_of(&case);
        let placements = placements(&case["placements"]);
        let ndim = case["shape"].as_array().unwrap().len();
        let sharding = Sharding::from_torch(&placements, ndim, &mesh);
        if case["nested"] == "not representable" {
            let error = sharding.expect_err("a gather would not be an exact inverse");
            assert!(
                error.to_string().contains("so a gather could not put the pieces back"),
                "{}: {error}",
                case["id"]
            );
            counts[2] += 1;
            continue;
        }
        let sharding = sharding.unwrap_or_else(|it| panic!("{}: {it}", case["id"]));
        sharding.validate(&numbers(&case["shape"]), &mesh).unwrap();
        check_ranks(&case, &sharding, &mesh);
        counts[usize::from(case["nested"] == "differs")] += 1;
        let back = sharding.to_torch(&mesh).unwrap();
        let plain = |it: &Placement| match *it {
            Placement::StridedShard { dim, split: 1 } => Placement::Shard { dim },
            other => other,
        };
        assert_eq!(back, placements.iter().map(plain).collect::<Vec<_>>(), "{}", case["id"]);
    }
    assert_eq!(counts, [641, 12, 23]);
}

/// FSDP appends its axes to whatever TP did, and the result is what PyTorch's FSDP holds and calls
/// it.
#[test]
fn fsdp_gives_the_layout_of_fully_shard() {
    let mut n = 0;
    for case in cases("placements.jsonl").iter().filter(|it| it["kind"] == "fsdp2") {
        let mesh = mesh_of(case);
        let ndim = case["shape"].as_array().unwrap().len();
        let tp_only: Vec<Placement> = mesh
            .user_axes()
            .iter()
            .map(|(name, _)| match case["tp"] == *name {
                true => placement(&case["tp_placement"]),
                false => Placement::Replicate,
            })
            .collect();
        let tp_only = Sharding::from_torch(&tp_only, ndim, &mesh).unwrap();
        // The last axis of FSDP's mesh shards, the one before it holds copies (HSDP).
        let shard = case["dp_mesh"].as_array().unwrap().last().unwrap().as_str().unwrap();
        let dim = case["fsdp_dim"].as_u64().unwrap() as usize;
        let sharding = fsdp(&tp_only, dim, mesh.axes_named(shard));
        let id = &case["id"];
        assert_eq!(sharding.to_torch(&mesh).unwrap(), placements(&case["placements"]), "{id}");
        check_ranks(case, &sharding, &mesh);
        n += 1;
    }
    assert_eq!(n, 194);
}

fn data(value: &Value) -> Vec<f64> {
    value["data"].as_array().unwrap().iter().map(|it| it.as_f64().unwrap()).collect()
}

#[test]
fn redistributions_agree_with_torch_value_by_value() {
    // PyTorch averages in f32: thirds are off by half a unit in the last place.
    const TOLERANCE: f64 = f32::EPSILON as f64;
    // Latency alone, bandwidth alone, and both: the paths differ, the values must not.
    let costs = [(1.0, 1e30), (0.0, 1.0), (1e-5, 1e8)];
    let costs = costs.map(|(latency, bandwidth)| CommCost { latency, bandwidth });
    let cases = cases("redistribute.jsonl");
    assert_eq!(cases.len(), 200);
    for case in cases {
        let id = &case["id"];
        let mesh = mesh_of(&case);
        let shape = numbers(&case["shape"]);
        let read = |it| Sharding::from_torch(&placements(it), shape.len(), &mesh).unwrap();
        let (from, to) = (read(&case["src"]), read(&case["dst"]));
        let ranks = case["ranks"].as_array().unwrap();
        for cost in &costs {
            let steps = reshard(&from, &to, &shape, 4, &mesh, cost).unwrap();
            let locals = ranks.iter().map(|it| data(&it["in"])).collect();
            let out = apply_steps(&steps, &from, &shape, &mesh, locals);
            for (ours, rank) in out.iter().zip(ranks) {
                let golden = data(&rank["out"]);
                assert_eq!(ours.len(), golden.len(), "{id}: {steps:?}");
                for (ours, golden) in ours.iter().zip(golden) {
                    let error = (ours - golden).abs();
                    assert!(error <= TOLERANCE * golden.abs(), "{id}: {ours} {golden} {steps:?}");
                }
            }
        }
    }
}
