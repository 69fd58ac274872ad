//! The whole pipeline, and lowering, scheduling and memory planning against an interpreter.

mod interpret;
mod model;
mod random;

use std::time::Instant;

use ir::Phase;
use ir::placement::Mesh;
use ir::plan::Plan;
use ir::verify;
use passes::{PassError, PassManager, PlanMemory, ScheduleOverlap};
use proptest::prelude::*;

use crate::{Compiled, Options, compile, lower};
use random::Choices;
use model::{Mlp, SMALL, mlp};

#[track_caller]
fn compiled(sizes: Mlp, mesh: &[(&str, u32)]) -> Compiled {
    let options = Options { dump_after: vec!["all".into()], ..Options::default() };
    match compile(mlp(sizes, Mesh::new(mesh)), &options) {
        Ok(it) => it,
        Err(error) => {
            let last = error.dumps.last().map_or("", |it| &it.text);
            panic!("{last}\n{error}");
        }
    }
}

#[test]
fn compiles_and_verifies() {
    let compiled = compiled(SMALL, &[("dp", 2), ("tp", 4)]);
    assert_eq!(verify::plan::verify(&compiled.plan), []);
    println!("{}", compiled.plan);
}

/// The plan of a graph in phase `Local`, verified at every step.
fn planned(graph: &ir::Graph, schedule: ScheduleOverlap) -> Result<(Plan, Plan), String> {
    let mut manager = PassManager::default();
    let start = Instant::now();
    let lowered = lower(graph);
    let fail = |it: PassError| it.to_string();
    manager.finish("lower", Phase::Lowered, &lowered, start).map_err(fail)?;
    let mut plan = lowered.clone();
    manager.run(&mut plan, &[&schedule, &PlanMemory]).map_err(fail)?;
    Ok((lowered, plan))
}

proptest! {
    #[test]
    fn random_graphs_keep_their_meaning(
        seed in any::<u64>(),
        n_nodes in 1_usize..60,
        prefetch in 0_usize..3,
        in_flight in 0_usize..3,
    ) {
        let graph = random::graph(&mut Choices(seed), n_nodes);
        prop_assert_eq!(verify::graph::verify(&graph), []);
        let schedule = ScheduleOverlap { prefetch, in_flight };
        let (lowered, plan) = planned(&graph, schedule).map_err(TestCaseError::fail)?;
        let expected = interpret::graph(&graph);
        let states = |it: &interpret::Outcome| -> interpret::Outcome {
            // A state that nothing touches has no buffer.
            let kept = expected.iter().filter(|kept| it.contains_key(kept.0));
            kept.map(|it| (it.0.clone(), *it.1)).collect()
        };
        let found = interpret::plan(&lowered, interpret::ByBuffer::default(), |_| 0);
        prop_assert_eq!(&states(&found), &found, "lowered:\n{}", lowered);
        let mut choices = Choices(seed);
        for _ in 0..4 {
            // Runs of one stream may be long, so that others fall far behind.
            let (mut left, mut favourite) = (0, 0);
            let pick = |n: usize| {
                if left == 0 {
                    (left, favourite) = (1 + choices.below(12), choices.below(8));
                }
                left -= 1;
                favourite % n
            };
            let found = interpret::plan(&plan, interpret::ByByte::default(), pick);
            prop_assert_eq!(&states(&found), &found, "planned:\n{}", plan);
        }
    }
}
