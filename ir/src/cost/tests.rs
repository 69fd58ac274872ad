//! Times that can be worked out by hand, on a machine with round numbers.

use super::*;
use crate::placement::{Axis, AxisSet, Mesh};
use crate::text::parse_plan;

/// Copies 1 GB/s, multiplies 1 GFLOP/s, launches in no time; collectives send 1 GB/s after 1 ms, to other nodes
/// of 2 ranks 0.25 GB/s for each rank, with hops of 1 ms and 3 ms.
fn machine() -> Target {
    let mut res = Target::builtin("cpu").unwrap();
    res.ranks_per_node = 2;
    res.bandwidth.0 = 1e9;
    res.launch.0 = 0.0;
    res.gemm.bf16.0 = 1e9;
    res.sustained.0 = 1.0;
    res.overlap.0 = 0.0;
    let at = |seconds: f64, bytes: f64| bytes / seconds;
    let points = |share: f64| {
        let size = |it: f64| (it as u64, at(0.001 + share * it / 1e9, share * it));
        [size(1e6), size(1e8)]
    };
    res.node.all_gather.points = points(0.5);
    res.node.reduce_scatter.points = points(0.5);
    res.node.all_reduce.points = points(1.0);
    // One protocol.
    (res.node.small.0, res.node.small_factor.0) = (0.001, 1.0);
    res.network.0 = 0.25e9;
    res.hops.node = 1e-3;
    res.hops.node_small = 1e-3;
    res.hops.network = 3e-3;
    res.hops.network_small = 3e-3;
    res.hops.tree_node = 1.0;
    res.hops.tree_network = 1.0;
    res.hops.tree_network_small = 1.0;
    res
}

fn plan(mesh: &str, step: &str) -> Plan {
    let events = step.matches(": record ").count();
    let text = format!(
        "plan @test phase=scheduled mesh=({mesh}) events={events} {{
  comm c0 = (dp)
  stream s0 = compute
  stream s1 = comm
  buffer %a : f32[1000000] @ [dp] input
  buffer %b : f32[1000000] @ [_] temp
  buffer %c : f32[1000000] @ [_] temp
  buffer %d : f32[1000000] @ [_] temp
  buffer %p : f32[1000000] @ [_] sum(dp) input
  buffer %r : f32[1000000] @ [_] temp
  step:
{step}}}
"
    );
    parse_plan(&text).unwrap_or_else(|it| panic!("{it}\n{text}"))
}

#[track_caller]
fn close(found: f64, expect: f64) {
    assert!((found - expect).abs() < 1e-9, "{found} is not {expect}");
}

/// Seconds of a step.
fn step(mesh: &str, step: &str) -> f64 {
    Timeline::predict(&plan(mesh, step), &machine()).section_seconds(PlanSection::Step)
}

#[test]
fn all_profiles_can_be_read() {
    for name in Target::NAMES {
        assert_eq!(Target::builtin(name).unwrap().name, name);
    }
    assert_eq!(Target::builtin("v100"), None);
}

#[test]
fn profiles_without_sense_are_refused() {
    let text = include_str!("../../profiles/h200.ron");
    let check = |from: &str, to: &str, expect: &str| {
        assert!(text.contains(from), "{from}");
        let error = Target::parse(&text.replace(from, to)).unwrap_err().to_string();
        assert!(error.contains(expect), "{error}");
    };
    check("bandwidth: (4.2e12", "bandwidth: (0", "`bandwidth` is 0");
    check("bandwidth: (4.2e12", "bandwidth: (NaN", "`bandwidth` is NaN");
    check("overlap: (0.35", "overlap: (1", "`overlap` is 1, and must be a share");
    check("launch: (5e-6", "launch: (-1", "`launch` is -1");
    check("(1073741824, 265e9)", "(1073741824, 26e9)", "`node.all_gather.points`");
    check("tile: (128, 256)", "tiles: (128, 256)", "Unexpected field named `tiles`");
}

#[test]
fn an_op_takes_its_bytes_and_a_gemm_its_products_too() {
    // 4 MB read, 4 MB written.
    close(step("dp=1", "  s0: %c = scale(factor:2.0) %b\n"), 8e-3);
    let text = "plan @gemm phase=scheduled mesh=(dp=1) events=0 {
  stream s0 = compute
  buffer %a : bf16[100, 1000] @ [_, _] input
  buffer %b : bf16[500, 1000] @ [_, _] input
  buffer %c : bf16[100, 500] @ [_, _] temp
  step:
  s0: %c = matmul(transpose_b:true) %a, %b
}
";
    let found = Timeline::predict(&parse_plan(text).unwrap(), &machine()).step_seconds();
    // A machine that makes 8192^3 at 1 GFLOP/s spends 3 x 2 x 8192^2 B of that on moving; the rest is its rate.
    let known = 2.0 * 8192_f64.powi(3) / 1e9;
    let rate = 2.0 * 8192_f64.powi(3) / (known - 6.0 * 8192_f64.powi(2) / 1e9);
    close(found, 1e8 / rate + 1.3e6 / 1e9);
}

#[test]
fn groups_know_their_nodes() {
    let check = |mesh: &Mesh, axes: &[u8], expect: (u64, u64, u64)| {
        let axes: AxisSet = axes.iter().map(|&it| Axis(it)).collect();
        let found = Group::of(mesh, axes, 8);
        assert_eq!((found.ranks, found.nodes, found.in_node), expect, "{}", mesh.names(axes));
    };
    let mesh = Mesh::new(&[("dp", 4), ("tp", 4)]);
    check(&mesh, &[1], (4, 1, 4));
    check(&mesh, &[0], (4, 2, 2));
    check(&mesh, &[0, 1], (16, 2, 8));
    // Groups of three: some lie in one node, some in two, of which one has a single rank.
    check(&Mesh::new(&[("dp", 4), ("tp", 3)]), &[1], (3, 2, 1));
    check(&Mesh::new(&[("dp", 16), ("tp", 8)]), &[0], (16, 16, 1));
}

#[test]
fn a_ring_has_hops_and_the_bandwidth_of_its_narrowest_link() {
    let gather = "  s1: %b = all_gather %a on c0\n";
    // 1 ms, and half of 4 MB at 1 GB/s.
    close(step("dp=2", gather), 1e-3 + 2e-3);
    // Four ranks in two nodes: three steps of which one leads to another node and one is in the latency; two
    // ranks of a node send to the other node at 0.25 GB/s each.
    close(step("dp=4", gather), 1e-3 + 1e-3 + 3e-3 + 3e6 / 0.5e9);
    let reduce = "  s1: %r = all_reduce(sum) %p on c0\n";
    close(step("dp=2", reduce), 1e-3 + 4e-3);
    close(step("dp=4", reduce), 1e-3 + 2.0 * (1e-3 + 3e-3) + 6e6 / 0.5e9);
}

#[test]
fn a_tree_is_taken_where_it_is_faster() {
    let mut target = machine();
    target.hops.tree_network = 1e-3;
    target.hops.tree_node = 0.0;
    let plan = plan("dp=16", "  s1: %r = all_reduce(sum) %p on c0\n");
    let found = Timeline::predict(&plan, &target).step_seconds();
    // Eight nodes: three levels up and down, and 8 MB at 0.9 of two links; a ring has 44 ms of hops.
    close(found, 1e-3 + 6e-3 + 8e6 / (0.9 * 0.5e9));
}

#[test]
fn streams_run_side_by_side_and_waiting_is_exposed() {
    let plan = plan(
        "dp=2",
        "  s1: %b = all_gather %a on c0
  s1: record e0
  s0: %c = scale(factor:2.0) %d
  s0: wait e0
  s0: %d = scale(factor:2.0) %b
",
    );
    let mut target = machine();
    let found = Timeline::predict(&plan, &target);
    // The gather's 3 ms are over before the first op's 8.
    assert_eq!(found.exposed, []);
    close(found.step_seconds(), 16e-3);
    target.bandwidth.0 = 8e9;
    let found = Timeline::predict(&plan, &target);
    // The op takes 1 ms, and the next one waits for 2.
    close(found.step_seconds(), 4e-3);
    close(found.exposed_seconds(), 2e-3);
    let exposed = found.exposed[0];
    assert_eq!((found.exposed.len(), exposed.section, exposed.index), (1, PlanSection::Step, 0));
    close(exposed.start, 1e-3);
    close(exposed.end, 3e-3);
    let cost = found.step_cost(&plan, &target);
    close(cost.communication_seconds, 3e-3);
    // Half of its speed is lost while communication runs.
    target.overlap.0 = 0.5;
    let found = Timeline::predict(&plan, &target);
    close(found.section(PlanSection::Step)[2].end, 2e-3);
    target.bandwidth.0 = 1e9;
    let found = Timeline::predict(&plan, &target);
    // 1.5 ms of its 8 are done when the gather's 3 ms are over.
    close(found.section(PlanSection::Step)[2].end, 9.5e-3);
}

// A launch takes what is queued on the stream one after the other in a section (`docs/gpu.md`).
#[test]
fn ops_are_one_launch_only_if_nothing_is_between_them() {
    let mut target = machine();
    target.launch.0 = 1.0;
    target.bandwidth.0 = 1e18;
    let launches = |between: &str| {
        let text = format!(
            "plan @test phase=scheduled mesh=(dp=2) events=1 {{
  comm c0 = (dp)
  stream s0 = compute
  stream s1 = comm
  buffer %a : f32[8] @ [_] input
  buffer %b : f32[8] @ [_] temp
  buffer %m : f32[] @ [] temp
  buffer %n : f32[] @ [] temp
  step:
  s0: %m = amax %a
{between}  s0: %n = amax %a
}}
"
        );
        let plan = parse_plan(&text).unwrap_or_else(|it| panic!("{it}\n{text}"));
        Timeline::predict(&plan, &target).section_seconds(PlanSection::Step).round()
    };
    assert_eq!(launches(""), 1.0);
    assert_eq!(launches("  s1: record e0\n"), 1.0);
    assert_eq!(launches("  s0: record e0\n"), 2.0);
    assert_eq!(launches("  s1: record e0\n  s0: wait e0\n"), 2.0);
    assert_eq!(launches("  s0: %b = copy %a\n"), 3.0);
}
