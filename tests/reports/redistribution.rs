//! Moves from one layout to another, as seen in the plan that `planc compile` makes of them: what C58 and C59 ask of
//! the planner (`ir/tests/placement/reports.rs`) holds for the sequence that is emitted, too.

use ir::DType;
use ir::placement::{AxisSet, CommCost, Mesh, Sharding, reshard_cost};
use ir::plan::{Instruction, Plan, PlanSection};
use ir::summary::traffic;

use crate::harness::finish;

/// The plan of a step that moves an input from one layout to another and keeps it.
#[track_caller]
fn plan(mesh: &Mesh, shape: &[u64], from: &str, to: &str) -> Plan {
    let axes: Vec<String> = mesh.axes.iter().map(|it| format!("{}={}", it.name, it.size)).collect();
    let axes = axes.join(", ");
    let text = format!(
        "graph @move phase=logical mesh=({axes}) {{
  input %x : f32{shape:?} @ {from} pinned
  state %y : f32{shape:?} @ {to} pinned
  forward:
  %moved = reshard %x : f32{shape:?} @ {to} pinned
  store %y = %moved in forward
}}\n"
    );
    let graph = ir::text::parse_graph(&text).unwrap_or_else(|it| panic!("{it}\n{text}"));
    finish(graph).into_plan()
}

/// Seconds of a plan's step by the planner's own prices, from the buffers of its collectives.
fn simulated(plan: &Plan, cost: &CommCost) -> f64 {
    let of = |it: &Instruction| match it {
        Instruction::Collective { kind, comm, parts, .. } if !kind.is_local() => {
            let (_, sent) = traffic(plan, *kind, plan.comms[*comm], parts);
            cost.latency + sent as f64 / cost.bandwidth
        }
        _ => 0.0,
    };
    plan.section(PlanSection::Step).iter().map(of).sum()
}

// C58, xla#15207, jax#21562: "involuntary full rematerialization" of P(y, None, x) -> P(None, (x, y), None).
#[test]
fn two_axes_move_into_one_dimension_without_a_whole_tensor() {
    let mesh = Mesh::new(&[("x", 4), ("y", 2)]);
    let plan = plan(&mesh, &[16, 16, 16], "[y, _, x]", "[_, x.y, _]");
    let shard = 16 * 16 * 16 / 8 * DType::F32.bytes();
    for buffer in plan.buffers.keys() {
        let name = &plan.buffers[buffer].name;
        assert!(
            plan.local_bytes(buffer) <= 2 * shard,
            "`{name}` has {} bytes",
            plan.local_bytes(buffer)
        );
    }
    let summary = ir::summary::Summary::of(&plan);
    assert!(summary.wire_bytes() > 0, "something must move");
    assert!(summary.wire_bytes() <= 2 * shard, "{:?}", summary.collectives);
    assert!(summary.persistent_bytes + summary.step_bytes <= 4 * shard, "{summary:?}");
}

/// What two mesh axes can do to a matrix, in PyTorch's terms, written as layouts.
const LAYOUTS: [&str; 15] = [
    "[_, _]",
    "[dp, _]",
    "[_, dp]",
    "[tp, _]",
    "[_, tp]",
    "[dp, tp]",
    "[tp, dp]",
    "[dp.tp, _]",
    "[_, dp.tp]",
    "[tp.dp, _]",
    "[_, tp.dp]",
    "[_, _] sum(dp)",
    "[_, _] sum(tp)",
    "[tp, _] sum(dp)",
    "[_, dp] sum(tp)",
];

// C59, pytorch#157585, pytorch#132751, autoparallel PR#462: the model of costs and the collectives that were emitted
// were two things.
#[test]
fn planned_cost_is_that_of_the_emitted_sequence() {
    let mesh = Mesh::new(&[("dp", 16), ("tp", 8)]);
    let shape = [256, 512];
    let cost = CommCost::default();
    let parse = |it: &str| Sharding::parse(it, &mesh).unwrap();
    let mut moves = 0;
    for from in LAYOUTS {
        // What is kept is no sum.
        for to in LAYOUTS.into_iter().filter(|to| *to != from && !to.contains("sum")) {
            let planned =
                reshard_cost(&parse(from), &parse(to), &shape, DType::F32.bytes(), &mesh, &cost)
                    .unwrap();
            let found = simulated(&plan(&mesh, &shape, from, to), &cost);
            let close = (planned - found).abs() <= 1e-9 * planned;
            assert!(close, "{from} -> {to}: planned {planned:e} s, emitted {found:e} s");
            moves += usize::from(found > 0.0);
        }
    }
    // Of 15 x 11 - 11 pairs, those that only cut copies are free.
    assert!(moves > 100, "{moves}");
}

// C59: S(0)S(1) -> S(1)S(0) on dp16 x tp8 went through a whole tensor.
#[test]
fn swapped_dimensions_are_one_exchange() {
    let mesh = Mesh::new(&[("dp", 16), ("tp", 8)]);
    let plan = plan(&mesh, &[256, 512], "[dp, tp]", "[tp, dp]");
    let collectives: Vec<_> = plan
        .section(PlanSection::Step)
        .iter()
        .filter_map(|it| match it {
            Instruction::Collective { kind, comm, .. } => Some((kind.name(), plan.comms[*comm])),
            _ => None,
        })
        .collect();
    assert_eq!(collectives, [("permute", mesh.axes().collect::<AxisSet>())]);
}
