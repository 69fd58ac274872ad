//! The whole pipeline, and lowering, scheduling and memory planning against an interpreter.

mod interpret;
mod model;
mod random;

use std::time::Instant;

use cranelift_entity::EntityRef;
use ir::graph::Def;
use ir::ops::{Collective, CollectiveKind, Reshard};
use ir::placement::{Mesh, ReduceOp, Sharding};
use ir::plan::{Instruction, Plan, PlanSection, Role, StreamKind};
use ir::{DType, Graph, Node, Phase, Value, verify};
use passes::{
    Autodiff, InsertCollectives, Pass, PassError, PassManager, PlanMemory, PropagateShardings,
    ScheduleOverlap, Update,
};
use proptest::prelude::*;

use crate::{Compiled, Options, compile, lower};
use model::{Mlp, SMALL, mlp};
use random::Choices;

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
    println!("{}", *compiled.plan);
}

/// The plan of a graph in phase `Local`, verified at every step.
fn planned(graph: &Graph, schedule: ScheduleOverlap) -> Result<(Plan, Plan), String> {
    let mut manager = PassManager::default();
    let start = Instant::now();
    let lowered = lower(graph);
    let fail = |it: PassError| it.to_string();
    manager.finish("lower", (Phase::Local, Phase::Lowered), &lowered, start).map_err(fail)?;
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
        let (prefetch_forward, prefetch_backward) = (prefetch, (prefetch + in_flight) % 3);
        let schedule = ScheduleOverlap { prefetch_forward, prefetch_backward, in_flight };
        let (lowered, plan) = planned(&graph, schedule).map_err(TestCaseError::fail)?;
        let expected = interpret::graph(&graph);
        let states = |it: &interpret::Outcome| -> interpret::Outcome {
            // A state that nothing touches has no buffer.
            let kept = expected.iter().filter(|kept| it.contains_key(kept.0));
            kept.map(|it| (it.0.clone(), *it.1)).collect()
        };
        // What `prepare` leaves for a step is a state of the plan alone.
        let known = |mut it: interpret::Outcome| {
            it.retain(|name, _| expected.contains_key(name));
            it
        };
        let found = known(interpret::plan(&lowered, interpret::ByBuffer::default(), |_| 0));
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
            let found = known(interpret::plan(&plan, interpret::ByByte::default(), pick));
            prop_assert_eq!(&states(&found), &found, "planned:\n{}", plan);
        }
    }
}

/// Whether the verifier finds a plan sound where pairwise comparison does, and only there.
#[track_caller]
fn check_verdict(plan: &Plan, what: &str) -> bool {
    let errors = verify::plan::verify(plan);
    let sound = interpret::is_sound(plan);
    assert_eq!(errors.is_empty(), sound, "{what}: {errors:#?}");
    sound
}

#[test]
fn every_dropped_event_and_every_swap_is_judged_right() {
    let plan = compiled(Mlp { layers: 2, ..SMALL }, &[("dp", 2), ("tp", 2)]).plan.into_plan();
    assert!(check_verdict(&plan, "the plan itself"));
    let section = PlanSection::Step as usize;
    let mut caught = [0, 0];
    for index in 0..plan.sections[section].len() - 1 {
        let mut mutant = plan.clone();
        if let Instruction::Wait { .. } = mutant.sections[section].remove(index) {
            caught[0] += usize::from(!check_verdict(&mutant, &format!("without wait {index}")));
        }
        let mut mutant = plan.clone();
        mutant.sections[section].swap(index, index + 1);
        let events =
            |it: &Instruction| matches!(it, Instruction::Record { .. } | Instruction::Wait { .. });
        if !mutant.sections[section][index..index + 2].iter().any(events) {
            caught[1] += usize::from(!check_verdict(&mutant, &format!("swapped at {index}")));
        }
    }
    // Some waits are for memory that is not reused yet, some neighbours are independent.
    assert!(caught[0] > 20 && caught[1] > 20, "{caught:?}");
}

#[test]
fn every_shifted_buffer_is_judged_right() {
    let plan = compiled(Mlp { layers: 2, ..SMALL }, &[("dp", 2), ("tp", 2)]).plan.into_plan();
    let mut caught = 0;
    for (buffer, data) in plan.buffers.iter().filter(|it| it.1.role == Role::Temp) {
        for shift in [ir::plan::ALIGN, 8 * ir::plan::ALIGN] {
            let mut mutant = plan.clone();
            mutant.step_bytes += 8 * ir::plan::ALIGN;
            mutant.buffers[buffer].offset = data.offset.map(|it| it + shift);
            let what = format!("%{} moved by {shift}", data.name);
            caught += usize::from(!check_verdict(&mutant, &what));
        }
    }
    assert!(caught > 50, "{caught}");
}

/// Every mutant of a good plan must be reported, with a message that contains `expect`.
#[track_caller]
fn check_caught(expect: &str, mutate: impl Fn(&mut Plan)) {
    let mut plan = compiled(SMALL, &[("dp", 2), ("tp", 2)]).plan.into_plan();
    mutate(&mut plan);
    let errors: Vec<String> = verify::plan::verify(&plan).iter().map(|it| it.to_string()).collect();
    assert!(errors.iter().any(|it| it.contains(expect)), "`{expect}` is not in {errors:#?}");
}

/// The first collective of `kind` in `step`.
fn collective<'a>(plan: &'a mut Plan, name: &str) -> &'a mut Instruction {
    let is = |it: &&mut Instruction| matches!(it, Instruction::Collective { kind, .. } if kind.name() == name);
    plan.sections[PlanSection::Step as usize].iter_mut().find(is).expect("there is one")
}

#[test]
fn broken_plans_are_reported() {
    check_caught("which nothing has written in time", |plan| {
        let step = &mut plan.sections[PlanSection::Step as usize];
        let index = step.iter().position(|it| matches!(it, Instruction::Compute { .. }));
        step.remove(index.expect("there is one"));
    });
    check_caught("is all_gather over (dp)", |plan| {
        let Instruction::Collective { kind, .. } = collective(plan, "all_gather") else { return };
        *kind = CollectiveKind::AllReduce(ReduceOp::Sum);
    });
    check_caught("is all_gather over (dp)", |plan| {
        let other =
            plan.comms.iter().find(|it| plan.mesh.names(*it.1) == "tp").expect("tp moves").0;
        let Instruction::Collective { comm, .. } = collective(plan, "all_gather") else { return };
        *comm = other;
    });
    check_caught("where the op has it as", |plan| {
        let buffer = plan.buffer("layers.0.act").expect("it is there");
        plan.buffers[buffer].sharding = Sharding::replicated(2);
    });
    check_caught("not bf16[32, 64], bf16[32]", |plan| {
        let buffer = plan.buffer("layers.0.rstd").expect("it is there");
        plan.buffers[buffer].ty.dtype = DType::Bf16;
    });
    check_caught("which it may not", |plan| {
        let is_norm = |it: &&mut Instruction| {
            matches!(it, Instruction::Compute { op: ir::Op::RmsNorm(_), .. })
        };
        let step = &mut plan.sections[PlanSection::Step as usize];
        let Some(Instruction::Compute { args, results, .. }) = step.iter_mut().find(is_norm) else {
            return;
        };
        results[0] = args[0];
    });
    check_caught("leave an arena of", |plan| plan.step_bytes -= 256);
    check_caught("both survive a step", |plan| {
        let param = plan.params[0].buffer;
        plan.buffers[plan.params[1].buffer].offset = plan.buffers[param].offset;
    });
    check_caught("has no offset", |plan| plan.buffers[plan.params[1].buffer].offset = None);
    check_caught("not a multiple of 256", |plan| {
        plan.step_bytes += 1;
        plan.buffers[plan.results[1].1].offset = Some(plan.step_bytes - 5);
    });
    check_caught("is recorded twice", |plan| {
        let step = &mut plan.sections[PlanSection::Step as usize];
        let record = step.iter().find(|it| matches!(it, Instruction::Record { .. })).cloned();
        step.extend(record);
    });
    check_caught("waits for what this section has not recorded", |plan| {
        let step = &mut plan.sections[PlanSection::Step as usize];
        step.retain(|it| !matches!(it, Instruction::Record { .. }));
    });
    check_caught("has collectives on", |plan| {
        let other = plan.streams.push(StreamKind::Comm.into());
        if let Instruction::Collective { stream, .. } = collective(plan, "all_gather") {
            *stream = other;
        }
    });
    check_caught("computes on a stream for communication", |plan| {
        let other = plan.streams.push(StreamKind::Comm.into());
        let step = &mut plan.sections[PlanSection::Step as usize];
        for instruction in step {
            if let Instruction::Compute { stream, .. } = instruction {
                *stream = other;
            }
        }
    });
    check_caught("which nothing has written in time", |plan| {
        let buffer = plan.buffer("layers.0.up.grad.f32").expect("it is there");
        plan.buffers[buffer].role = Role::Temp;
    });
    check_caught("not whole on every rank", |plan| plan.results[0].1 = plan.params[0].buffer);
    check_caught("another buffer has this name", |plan| {
        plan.buffers[plan.params[1].buffer].name = plan.buffers[plan.params[0].buffer].name.clone();
    });
    check_caught("does not exist", |plan| plan.events = 1);
}

/// Every mutant of a good graph in phase `Explicit` must be reported.
#[track_caller]
fn check_graph_caught(expect: &str, mutate: impl Fn(&mut Graph)) {
    let mut graph = mlp(SMALL, Mesh::new(&[("dp", 2), ("tp", 2)]));
    let passes: &[&dyn Pass<Graph>] =
        &[&Autodiff, &Update, &PropagateShardings, &InsertCollectives];
    PassManager::default().run(&mut graph, passes).expect("it compiles");
    mutate(&mut graph);
    let errors: Vec<String> =
        verify::graph::verify(&graph).iter().map(|it| it.to_string()).collect();
    assert!(errors.iter().any(|it| it.contains(expect)), "`{expect}` is not in {errors:#?}");
}

fn value(graph: &Graph, name: &str) -> Value {
    graph.values.iter().find(|it| it.1.name == name).expect("it is there").0
}

fn producer(graph: &Graph, name: &str) -> Node {
    graph.producer(value(graph, name)).expect("a node makes it")
}

#[test]
fn broken_graphs_are_reported() {
    check_graph_caught("before it is made", |graph| graph.order.reverse());
    check_graph_caught("comes after a node of", |graph| {
        let first = graph.order.remove(0);
        graph.order.push(first);
    });
    check_graph_caught("is listed twice", |graph| graph.order.push(graph.order[0]));
    check_graph_caught("names a value that does not exist", |graph| {
        let node = graph.order[0];
        graph.nodes[node].inputs[0] = Value::new(1 << 20);
    });
    check_graph_caught("names another maker", |graph| {
        let node = graph.order[0];
        let result = graph.nodes[node].results[0];
        graph.values[result].def = Def::State;
    });
    check_graph_caught("another value has this name", |graph| {
        let param = graph.params[0].value;
        graph.values[param].name = "x".into();
    });
    check_graph_caught("not bf16[32, 64], f32[64]", |graph| {
        let value = value(graph, "layers.0.rstd");
        graph.values[value].ty.shape[0] = 64;
    });
    check_graph_caught("has no sharding", |graph| {
        let value = value(graph, "layers.0.act");
        graph.values[value].sharding = None;
    });
    check_graph_caught("where the op has it as", |graph| {
        let value = value(graph, "layers.0.act");
        graph.values[value].sharding = Some(Sharding::replicated(2));
    });
    check_graph_caught("partial value, which this op cannot take", |graph| {
        let node = producer(graph, "layers.0.act");
        let input = graph.nodes[node].inputs[0];
        let sharding = graph.sharding(input);
        let free = graph.mesh.all().minus(sharding.sharded_axes());
        graph.values[input].sharding = Some(sharding.with_partial(ReduceOp::Sum, free));
    });
    check_graph_caught("is all_gather over (dp)", |graph| {
        let node = producer(graph, "layers.0.up.full");
        let axes = graph.mesh.axis_set(&["tp"]).expect("an axis");
        graph.nodes[node].op = Collective { kind: CollectiveKind::AllGather, axes }.into();
    });
    check_graph_caught("data moves in a `reshard`", |graph| {
        let node = producer(graph, "layers.0.up.full");
        graph.nodes[node].op = Reshard::default().into();
    });
    check_graph_caught("a collective before its time", |graph| graph.phase = Phase::Sharded);
    check_graph_caught("is stored twice", |graph| graph.stores.push(graph.stores[0]));
    check_graph_caught("and is no state", |graph| graph.stores[0].state = graph.stores[0].value);
    check_graph_caught("laid out differently", |graph| {
        let state = graph.stores[0].state;
        graph.values[state].sharding = Some(Sharding::replicated(1));
    });
    check_graph_caught("not whole on every rank", |graph| {
        let made = value(graph, "layers.0.act");
        graph.results[0].1 = made;
    });
}

#[test]
fn an_unfinished_plan_is_not_proved() {
    let mut plan = compiled(SMALL, &[("dp", 2), ("tp", 2)]).plan.into_plan();
    plan.phase = Phase::Scheduled;
    let proof = kernels::Proved::of(plan).expect_err("it has no memory");
    let message = "its buffers have no place in memory yet";
    assert!(proof.broken.iter().any(|it| it.message == message), "{:?}", proof.broken);
}
