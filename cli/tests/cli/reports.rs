//! What users of other systems reported about layouts and scales can be seen here without a run.
//! `tests/reports` trains the same models.

use std::collections::BTreeSet;

use serde_json::Value;

use crate::Folder;

/// A model of these layers, and what `planc` says of it.
fn model(test: &str, layers: &str, more: &str) -> Folder {
    let folder = Folder::new(test, &[]);
    let source = format!(
        r#"Model(
            name: "reported", batch: Global(8), sequence: 8, {more} optimizer: AdamW(),
            layers: [{layers} LmHead(name: "head"), CrossEntropy()],
        )"#
    );
    folder.write("model.ron", source);
    folder
}

#[track_caller]
fn json(folder: &Folder, line: &str) -> Value {
    serde_json::from_str(&folder.works(&format!("{line} --format json"))).expect("JSON")
}

/// Rows that each rank holds, in rank order; none for a rank that holds nothing.
fn rows(tensor: &Value) -> Vec<Vec<[u64; 2]>> {
    let mut res = vec![Vec::new(); 8];
    for shard in tensor["shards"].as_array().expect("a list") {
        for rank in shard["ranks"].as_array().expect("a list") {
            let rows = serde_json::from_value(shard["dims"][0].clone()).expect("ranges");
            res[rank.as_u64().expect("a rank") as usize] = rows;
        }
    }
    res
}

// C07, torchtitan PR#4593: 5 rows of one tp coordinate over two of dp were taken for 4 or 6.
#[test]
fn ten_rows_on_dp_2_x_tp_2_are_ten_rows() {
    let layers = r#"Embedding(name: "embed", vocab: 12, dim: 4),
        Linear(name: "up", out_features: 10, parallel_mode: Column), Activation(kind: gelu),
        Linear(name: "down", out_features: 4, parallel_mode: Row),"#;
    let folder = model("reported_c07", layers, "");
    let line = "inspect model.ron --mesh 2x2 --param up.weight* --states";
    let found = json(&folder, line);
    let tensors = found["tensors"].as_array().expect("a list");
    let names: Vec<&str> = tensors.iter().filter_map(|it| it["name"].as_str()).collect();
    assert_eq!(names, ["up.weight", "up.weight.exp_avg", "up.weight.exp_avg_sq", "up.weight.step"]);
    for tensor in &tensors[..3] {
        assert_eq!(tensor["shape"], serde_json::json!([10, 4]), "{}", tensor["name"]);
        assert_eq!(
            rows(tensor)[..4],
            [[[0, 3]], [[5, 8]], [[3, 5]], [[8, 10]]],
            "{}",
            tensor["name"]
        );
    }
    insta::assert_snapshot!(
        "reported_c07",
        folder.works("inspect model.ron --mesh 2x2 --param up.weight")
    );
}

// C10, jax#26946: what does not divide was replicated, silently. Here it is cut, which is said and can be denied.
#[test]
fn a_vocabulary_of_17_on_8_ranks_is_cut_and_that_is_said() {
    let layers = r#"Embedding(name: "embed", vocab: 17, dim: 16),"#;
    let folder = model("reported_c10", layers, "");
    let found = json(&folder, "inspect model.ron --mesh 8 --param embed.weight");
    let tensor = &found["tensors"][0];
    assert_eq!(tensor["torch"], serde_json::json!(["Shard(0)"]));
    let sizes: Vec<u64> =
        rows(tensor).iter().map(|it| it.iter().map(|[a, b]| b - a).sum()).collect();
    assert_eq!(sizes, [3, 3, 3, 3, 3, 2, 0, 0]);
    insta::assert_snapshot!(
        "reported_c10",
        folder.works("inspect model.ron --mesh 8 --param embed.weight")
    );
    let said = folder.works("compile model.ron --mesh 8");
    let said = said.split_whitespace().collect::<Vec<_>>().join(" ");
    for lint in ["uneven", "empty-shards"] {
        assert!(said.contains(&format!("{lint}: `embed.weight`")), "{said}");
        let denied = folder.planc(&format!("compile model.ron --mesh 8 --deny {lint}"));
        assert!(denied.code == 1 && denied.stderr.contains("PL0611"), "{}", denied.stderr);
    }
}

// C33, TransformerEngine#656: with delayed scaling, amaxes of activations were reduced over data-parallel ranks only,
// and the documentation said so.
#[test]
fn amaxes_of_x_w_and_dy_are_reduced_over_the_axes_on_which_they_vary() {
    let layers = r#"Embedding(name: "embed", vocab: 16, dim: 32),
        Linear(name: "up", out_features: 64, bias: false, parallel_mode: Column), Activation(kind: gelu),
        Linear(name: "down", out_features: 32, bias: false, parallel_mode: Row),"#;
    let more = "sequence_parallel: true, precision: (compute: bf16), recipe: DelayedScaling(),";
    let folder = model("reported_c33", layers, more);
    let found = json(&folder, "inspect model.ron --mesh 2x2 --amax");
    let gemms = found["amax"].as_array().expect("a list");
    let mut groups = BTreeSet::new();
    for operand in gemms.iter().flat_map(|it| it["operands"].as_array().expect("a list")) {
        assert_eq!((&operand["scaling"], &operand["varies"]), (&"delayed".into(), &"".into()));
        let text = |it: &Value| it.as_str().expect("text").to_string();
        groups.insert([&operand["role"], &operand["tensor"], &operand["group"]["axes"]].map(text));
    }
    let expect = [
        // What comes back to the row-parallel layer is whole on every rank of tp.
        ["dy", "down.grad.sum", "dp"],
        // What comes back to the column-parallel one is cut as its output.
        ["dy", "up.grad", "dp, tp"],
        // Weights are cut by FSDP and by tp.
        ["w", "down.weight", "dp, tp"],
        ["w", "up.weight", "dp, tp"],
        // Batches are cut over dp, features of the first and the sequence of the other over tp.
        ["x", "act", "dp, tp"],
        ["x", "embed", "dp, tp"],
    ];
    assert_eq!(groups, expect.map(|it| it.map(str::to_string)).into());
    insta::assert_snapshot!("reported_c33", folder.works("inspect model.ron --mesh 2x2 --amax"));
}
