//! Every layout that PyTorch was measured with (`tests/golden/placements.jsonl`), as that of a parameter in a model.

use std::collections::BTreeMap;

use serde_json::Value;

use crate::harness::*;

fn numbers(value: &Value) -> Vec<u64> {
    value.as_array().unwrap().iter().map(|it| it.as_u64().unwrap()).collect()
}

/// A Block that reads parameter `p` of this shape: a bias, or the weight of a GEMM. Each axis of the mesh cuts the batch,
/// so that it has a job.
fn model(shape: &[u64], batch: u64, axes: &[String], placements: &[String]) -> String {
    let (dim, op) = match *shape {
        [n] => (n, "bias_add"),
        [_, k] => (k, "matmul(transpose_b:true)"),
        _ => unreachable!("parameters of one and two dims"),
    };
    let placements: Vec<String> =
        axes.iter().zip(placements).map(|(axis, it)| format!("\"{axis}\": {it}")).collect();
    format!(
        r#"Model(
            name: "layout",
            meshes: {{{n}: {axes:?}}},
            data_parallel: {axes:?},
            fsdp: (axes: []),
            batch: Global({batch}),
            sequence: 2,
            init: Normal(std: 0.5),
            optimizer: Sgd(momentum: 0.9),
            schedule: (lr: 1e-2),
            layers: [
                Embedding(name: "embed", vocab: 5, dim: {dim}),
                Block(
                    inputs: ["x"],
                    params: {{"p": (shape: {shape:?}, placements: {{{placements}}})}},
                    ops: [(op: "{op}", inputs: ["x", "p"], outputs: ["y"])],
                    outputs: ["y"],
                ),
                LmHead(name: "head"),
                CrossEntropy(),
            ],
        )"#,
        n = axes.len(),
        placements = placements.join(", "),
    )
}

/// A placement of PyTorch in `model.ron`.
fn placement(value: &Value) -> String {
    let dim = &value["dim"];
    match value["t"].as_str().unwrap() {
        "R" => "Replicate".to_string(),
        "S" => format!("Shard({dim})"),
        "SS" => format!("StridedShard({dim}, {})", value["sf"]),
        other => panic!("no placement of a parameter: {other}"),
    }
}

/// Checks the indices that each coordinate holds, as PyTorch holds them.
#[track_caller]
fn check_indices(case: &Value, found: &Outcome) {
    let buffer = &found.plan.buffers[found.plan.buffer("p").unwrap()];
    let mesh = &found.plan.mesh;
    let field = if case["nested"] == "differs" { "nested_index" } else { "index" };
    for rank in case["ranks"].as_array().unwrap() {
        let coord = mesh.coord_of(rank["rank"].as_u64().unwrap());
        for (dim, (layout, &size)) in buffer.sharding.dims.iter().zip(&buffer.ty.shape).enumerate()
        {
            let runs = layout.runs(size, mesh, &coord);
            let ours: Vec<u64> = runs.iter().flat_map(|&(at, n)| at..at + n).collect();
            let golden = match &rank[field][dim.to_string()] {
                Value::Null => (0..size).collect(),
                held => numbers(held),
            };
            assert_eq!(ours, golden, "{}, dim {dim} at {coord:?}", case["id"]);
        }
    }
}

/// Compiles, holds what PyTorch holds, and trains like one rank. What is refused: dims of size 0, which no parameter has,
/// and strided shards of which a gather is no inverse.
#[test]
fn parameters_have_every_layout_of_pytorch() {
    let path = format!("{}/golden/placements.jsonl", env!("CARGO_MANIFEST_DIR"));
    let text = std::fs::read_to_string(path).unwrap();
    let cases = text.lines().map(|it| serde_json::from_str::<Value>(it).unwrap());
    let mut of_one_rank: BTreeMap<(Vec<u64>, u64), Outcome> = BTreeMap::new();
    let mut counts: BTreeMap<&str, u32> = BTreeMap::new();
    for case in cases {
        let (shape, sizes) = (numbers(&case["shape"]), numbers(&case["mesh"]));
        if shape.len() > 2 {
            continue;
        }
        let axes: Vec<String> = (0..sizes.len()).map(|it| format!("m{it}")).collect();
        let placements: Vec<String> =
            case["placements"].as_array().unwrap().iter().map(placement).collect();
        let batch = sizes.iter().product();
        let source = model(&shape, batch, &axes, &placements);
        let mesh: Vec<String> = sizes.iter().map(u64::to_string).collect();
        let mesh = mesh.join("x");
        // An axis of one coordinate cuts nothing in a model, so that the split that it names is none.
        let unlike = case["nested"] == "not representable" && case["id"] != "p0557";
        let refused = match (shape.contains(&0), unlike) {
            (true, _) => Some(("empty", "PL0216")),
            (_, true) => Some(("not representable", "PL0202")),
            (false, false) => None,
        };
        if let Some((why, code)) = refused {
            let error = error(&source, &mesh, &[]);
            assert!(error.starts_with(code), "{}: {error}", case["id"]);
            *counts.entry(why).or_default() += 1;
            continue;
        }
        let expect = of_one_rank.entry((shape.clone(), batch)).or_insert_with(|| {
            let whole = model(&shape, batch, &axes[..1], &["Replicate".to_string()]);
            train(&whole, "1", &[], 1)
        });
        let found = train(&source, &mesh, &[], 1);
        check_indices(&case, &found);
        found.check_like(expect);
        *counts.entry("held").or_default() += 1;
    }
    let expect = [("empty", 12), ("held", 577), ("not representable", 13)];
    assert_eq!(counts.into_iter().collect::<Vec<_>>(), expect);
}
