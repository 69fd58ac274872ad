//! Gradients of vocabulary-parallel tables.

use ir::plan::{Instruction, PlanSection};
use runtime::Batch;

use crate::harness::*;

fn source(padding: &str) -> String {
    format!(
        r#"Model(
            name: "table",
            batch: Global(4),
            sequence: 4,
            init: Normal(std: 0.5),
            optimizer: Sgd(momentum: 0.9),
            fsdp: (axes: []),
            layers: [
                Embedding(name: "embed", vocab: 10, dim: 4{padding}),
                Linear(name: "up", out_features: 4),
                LmHead(name: "head"),
                CrossEntropy(),
            ],
        )"#
    )
}

/// Ids with 2, 7 and others, and none of 9.
fn batch() -> Batch {
    let tokens = vec![7, 2, 0, 7, 1, 2, 3, 4, 5, 6, 8, 7, 2, 2, 7, 0];
    let labels = (0..16).map(|it| 3 * it % 10).collect();
    Batch { tokens, labels }
}

// C27, torchtitan PR#4637: row 7 of 10 is row 2 of the second of two ranks, and both lost their
// gradient, or the run crashed.
#[test]
fn padding_is_a_global_row() {
    let plain = train_on("no padding", compile(&source(""), "1", &[]), &[batch()]);
    let expect = plain.gradient("embed.weight");
    assert!([2, 7].iter().all(|&it| row(expect, it, 4).iter().any(|&it| it != 0.0)));
    for mesh in ["1", "1x2", "1x4", "2x2", "4"] {
        for fsdp in ["[]", r#"["dp"]"#] {
            let plan = compile(&source(", padding_idx: 7"), mesh, &[("fsdp.axes", fsdp)]);
            let found = train_on(mesh, plan, &[batch()]);
            close(found.losses[0], plain.losses[0], LOSS, mesh);
            for i in 0..10 {
                let found = row(found.gradient("embed.weight"), i, 4);
                let what = format!("mesh {mesh}, row {i}");
                match i {
                    7 => assert_eq!(found, [0.0; 4], "{what}"),
                    _ => check_tensor(found, row(expect, i, 4), GRADIENT, &what),
                }
            }
        }
    }
}

// C60, xla#42481: the scatter-add of an embedding gradient was reduced wrongly.
#[test]
fn a_table_gradient_is_reduced_once_over_the_axis_of_the_ids() {
    let expect = train_on("1", compile(&source(""), "1", &[]), &[batch()]);
    for mesh in ["2x2", "4x2", "2x4", "2x2x2"] {
        let plan = compile(&source(""), mesh, &[]);
        let mut moves = Vec::new();
        let mut outputs = Vec::new();
        for section in [PlanSection::Step, PlanSection::Update] {
            for it in plan.section(section) {
                let Instruction::Collective { kind, comm, parts, .. } = it else { continue };
                let axes = plan.mesh.names(plan.comms[*comm]);
                for part in parts {
                    let data = &plan.buffers[part.src];
                    let name = &data.name;
                    if name.starts_with("embed.weight") && data.ty.ndim() == 2 {
                        moves.push(format!("{}({axes})", kind.name()));
                    } else if name == "embed" || name.starts_with("embed.partial") {
                        outputs.push(format!("{}({axes})", kind.name()));
                    }
                }
            }
        }
        let dp = if mesh == "2x2x2" { "dp_replicate, dp_shard" } else { "dp" };
        assert_eq!(moves, [format!("all_reduce({dp})")], "mesh {mesh}");
        assert_eq!(outputs, ["all_reduce(tp)"], "mesh {mesh}");
        train_on(mesh, plan, &[batch()]).check_like(&expect);
    }
}

// A table of 8 MiB for 16 tokens: what is found in it moves, and not the table. One rank finds a token
// and the others add zeros, so the first loss is that of the gathered table to the last bit.
#[test]
fn a_large_table_is_not_gathered_for_few_tokens() {
    let source = source("").replace("vocab: 10, dim: 4", "vocab: 32768, dim: 64");
    let source = source.replace("LmHead(name: \"head\")", "LmHead(name: \"head\", vocab: 10)");
    let whole = train_on("1", compile(&source, "1", &[]), &[batch()]);
    for mesh in ["2", "4", "2x2"] {
        let replicated = compile(&source, mesh, &[]);
        let plan = compile(&source, mesh, &[("fsdp.axes", r#"["dp"]"#)]);
        let mut moved = Vec::new();
        for it in plan.section(PlanSection::Step) {
            let Instruction::Collective { kind, comm, parts, .. } = it else { continue };
            let axes = plan.mesh.names(plan.comms[*comm]);
            let names = parts.iter().map(|it| plan.buffers[it.src].name.as_str());
            let forward = names.filter(|it| {
                *it == "tokens" || *it == "embed.weight" || it.starts_with("embed.partial")
            });
            moved.extend(forward.map(|it| format!("{}({axes}) {it}", kind.name())));
        }
        moved.retain(|it| !it.contains("(tp)"));
        assert_eq!(moved.len(), 2, "mesh {mesh}: {moved:?}");
        assert_eq!(moved[0], "all_gather(dp) tokens", "mesh {mesh}");
        assert!(moved[1].starts_with("reduce_scatter(dp) embed.partial"), "mesh {mesh}: {moved:?}");
        let expect = train_on(mesh, replicated, &[batch()]);
        let found = train_on(mesh, plan, &[batch()]);
        assert_eq!(found.losses, expect.losses, "mesh {mesh}");
        found.check_like(&whole);
    }
}
