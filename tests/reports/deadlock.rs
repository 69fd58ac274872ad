//! Ranks that wait for each other: orders of collectives, and shards that are empty.

use ir::ops::CollectiveKind;
use ir::plan::{Comm, PlanSection};
use ir::verify::{Property, plan::verify};
use runtime::bind::{BoundInstruction, bind};

use crate::harness::*;

/// The counterexamples to `communication` in a step over two communicators, each with a stream.
#[track_caller]
fn broken(step: &str) -> Vec<String> {
    let events = step.matches(": record ").count();
    let text = format!(
        "plan @f phase=scheduled mesh=(dp=2, tp=2) events={events} {{
  comm c0 = (dp)
  comm c1 = (tp)
  stream s0 = compute
  stream s1 = comm
  stream s2 = comm
  buffer %a : f32[8, 8] @ [dp, _] input
  buffer %b : f32[8, 8] @ [_, tp] input
  buffer %c : f32[8, 8] @ [dp, _] input
  buffer %a.full : f32[8, 8] @ [_, _] temp
  buffer %b.full : f32[8, 8] @ [_, _] temp
  buffer %c.full : f32[8, 8] @ [_, _] temp
  step:
{step}}}
"
    );
    let plan = ir::text::parse_plan(&text).unwrap_or_else(|it| panic!("{it}\n{text}"));
    let of = verify(&plan).into_iter().filter(|it| it.property == Some(Property::Communication));
    of.map(|it| it.to_string()).collect()
}

// C53, torchrec PR#4149, rccl#2191: two communicators used in different orders on different ranks. A plan
// has one order for all ranks; what it could get wrong is a circle of waits, which is named.
#[test]
fn communicators_that_wait_for_each_other_are_a_named_cycle() {
    let right = "  s1: %a.full = all_gather %a on c0
  s1: record e0
  s2: wait e0
  s2: %b.full = all_gather %b on c1
  s2: record e1
";
    assert_eq!(broken(right), [] as [&str; 0]);
    let found = broken(&format!("  s1: wait e1\n{right}"));
    let [found] = &found[..] else { panic!("{found:#?}") };
    let cycle = [
        "step 0 `s1: wait e1`",
        "step 5 `s2: record e1`",
        "step 4 `s2: %b.full = all_gather(tp) %b`",
        "step 3 `s2: wait e0`",
        "step 2 `s1: record e0`",
        "step 1 `s1: %a.full = all_gather(dp) %a`",
    ];
    let at: Vec<Option<usize>> = cycle.iter().map(|it| found.rfind(it)).collect();
    assert!(at.iter().all(Option::is_some) && at.is_sorted(), "{found}");
}

// C53 again: collectives of one communicator have one order, which two streams would not give them.
#[test]
fn a_communicator_with_two_streams_is_refused() {
    let found = broken(
        "  s1: %a.full = all_gather %a on c0
  s2: %c.full = all_gather %c on c0
",
    );
    let [found] = &found[..] else { panic!("{found:#?}") };
    assert!(found.contains("c0 has collectives on s1 and on s2"), "{found}");
    assert!(found.contains("that of step 0"), "{found}");
}

/// What a rank calls, in order.
fn calls(plan: &ir::plan::Plan, rank: u64) -> Vec<(PlanSection, Comm, CollectiveKind, usize)> {
    let bound = bind(plan, rank).unwrap();
    let of = |section: PlanSection| {
        let instructions = bound.sections[section as usize].clone();
        instructions.into_iter().filter_map(move |it| match it {
            BoundInstruction::Collective(it, _) => {
                Some((section, it.comm, it.kind, it.parts.len()))
            }
            _ => None,
        })
    };
    PlanSection::ALL.into_iter().flat_map(of).collect()
}

// C54, verl#6365, Megatron-LM PR#6573: ranks whose shard is empty called fewer collectives than others.
#[test]
fn ranks_with_empty_shards_call_every_collective() {
    const MLP: &str = r#"Model(
        name: "mlp",
        batch: Global(8),
        sequence: 4,
        precision: (compute: bf16),
        optimizer: AdamW(),
        layers: [
            Embedding(name: "embed", vocab: 12, dim: 3),
            LayerNorm(name: "norm", eps: 1e-5),
            LmHead(name: "head"),
            CrossEntropy(),
        ],
    )"#;
    let plan = compile(MLP, "8", &[]);
    let norm = &plan.buffers[plan.buffer("norm.weight").unwrap()];
    let held =
        |rank: u64| norm.sharding.extents(&norm.ty.shape, &plan.mesh, &plan.mesh.coord_of(rank))[0];
    assert_eq!((0..8).map(held).collect::<Vec<u64>>(), [1, 1, 1, 0, 0, 0, 0, 0]);
    let expect = calls(&plan, 0);
    assert_eq!(expect.len(), 3, "{expect:?}");
    for rank in 1..8 {
        assert_eq!(calls(&plan, rank), expect, "rank {rank}");
    }
    let proof = codegen::prove(&plan);
    let checked = proof.checked.iter().find(|it| it.property == Property::Communication).unwrap();
    assert!(proof.broken.is_empty() && checked.counts.contains(&("coordinates", 8)));
    // And the step that they do is that of one rank.
    train(MLP, "8", &[], 3).check_like(&train(MLP, "1", &[], 3));
}
