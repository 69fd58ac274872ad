//! Resharding against brute force: every step that is a step, every sequence of up to three.

use ir::placement::{
    Axis, AxisSet, CommCost, Digit, DimLayout, Mesh, ReduceOp, Sharding, Step, StepKind,
    apply_step, apply_steps, classify, copy_runs, reshard, step_bytes, step_cost,
};
use proptest::prelude::*;

use super::{parse, scattered};

/// Every way to use the axes of `mesh` for a tensor of `ndim` dimensions: each axis copies, is
/// partial, or cuts a dimension, in every order.
fn all_shardings(mesh: &Mesh, ndim: usize, ops: &[ReduceOp]) -> Vec<Sharding> {
    let mut res = vec![Sharding::replicated(ndim)];
    for axis in mesh.axes() {
        let mut next = Vec::new();
        for sharding in &res {
            next.push(sharding.clone());
            for dim in 0..ndim {
                let digits = sharding.dims[dim].digits();
                for at in 0..=digits.len() {
                    let mut digits = digits.to_vec();
                    digits.insert(at, Digit::Axis(axis));
                    next.push(sharding.with_dim(dim, super::layout(&digits)));
                }
            }
            for &op in ops {
                if sharding.partial.is_none_or(|(it, _)| it == op) {
                    next.push(sharding.with_partial(op, sharding.partial_axes().with(axis)));
                }
            }
        }
        res = next;
    }
    res
}

/// The cost of the best sequence of up to `n` steps from `start` to each sharding.
fn brute_force(start: usize, n: usize, edges: &[Vec<(usize, f64)>]) -> Vec<f64> {
    let mut best = vec![f64::INFINITY; edges.len()];
    best[start] = 0.0;
    for _ in 0..n {
        let before = best.clone();
        for (from, edges) in edges.iter().enumerate() {
            for &(to, cost) in edges {
                best[to] = best[to].min(before[from] + cost);
            }
        }
    }
    best
}

fn total(from: &Sharding, steps: &[Step], shape: &[u64], mesh: &Mesh, cost: &CommCost) -> f64 {
    let mut at = from;
    let mut res = 0.0;
    for step in steps {
        assert_eq!(classify(at, &step.to, shape, mesh), Some(step.kind), "a step is what it says");
        res += step_cost(step, at, shape, 4, mesh, cost);
        at = &step.to;
    }
    res
}

const COSTS: [CommCost; 4] = [
    CommCost { latency: 1.0, bandwidth: 1e30 },
    CommCost { latency: 0.0, bandwidth: 1.0 },
    CommCost { latency: 40.0, bandwidth: 1.0 },
    CommCost { latency: 300.0, bandwidth: 1.0 },
];

#[track_caller]
fn check_against_brute_force(mesh: &Mesh, shape: &[u64], ops: &[ReduceOp], every: usize) {
    let all = all_shardings(mesh, shape.len(), ops);
    for cost in &COSTS {
        let edge = |from: &Sharding, (i, to): (usize, &Sharding)| {
            let step = Step { kind: classify(from, to, shape, mesh)?, to: to.clone() };
            Some((i, step_cost(&step, from, shape, 4, mesh, cost)))
        };
        let edges: Vec<Vec<(usize, f64)>> = all
            .iter()
            .map(|from| all.iter().enumerate().filter_map(|to| edge(from, to)).collect())
            .collect();
        for (i, from) in all.iter().enumerate().step_by(every) {
            let best = brute_force(i, 3, &edges);
            for (to, best) in all.iter().zip(best) {
                let steps = reshard(from, to, shape, 4, mesh, cost).unwrap();
                let ours = total(from, &steps, shape, mesh, cost);
                assert_eq!(steps.last().map_or(from, |it| &it.to), to);
                assert!(
                    ours <= best * (1.0 + 1e-12),
                    "{} -> {} on {shape:?} with {cost:?} costs {ours}, brute force {best}: {steps:?}",
                    from.display(mesh),
                    to.display(mesh),
                );
            }
        }
    }
}

#[test]
fn never_worse_than_brute_force_on_two_axes() {
    let both = [ReduceOp::Sum, ReduceOp::Max];
    for sizes in [(2, 2), (2, 4), (4, 2), (3, 2), (8, 4), (1, 4)] {
        let mesh = Mesh::new(&[("x", sizes.0), ("y", sizes.1)]);
        for shape in [[16, 16], [32, 8], [5, 7], [1, 64]] {
            check_against_brute_force(&mesh, &shape, &both, 1);
        }
    }
}

#[test]
fn never_worse_than_brute_force_on_a_refined_axis() {
    let mesh = Mesh::new(&[("tp", 8)]).refine("tp", 2, "tp_kv", "tp_rep").unwrap();
    for shape in [[16, 16], [9, 13]] {
        check_against_brute_force(&mesh, &shape, &[ReduceOp::Sum], 1);
    }
}

#[test]
fn never_worse_than_brute_force_on_three_axes() {
    let mesh = Mesh::new(&[("x", 2), ("y", 3), ("z", 4)]);
    check_against_brute_force(&mesh, &[24, 12], &[ReduceOp::Sum], 9);
}

/// Every step that `classify` knows brings exactly the wanted elements from inside its group, for
/// uneven sizes too; `apply_step` checks that, and the values are compared here.
#[test]
fn every_step_is_exact() {
    for mesh in [
        Mesh::new(&[("x", 2), ("y", 3)]),
        Mesh::new(&[("x", 4), ("y", 2)]),
        Mesh::new(&[("tp", 6)]).refine("tp", 3, "a", "b").unwrap(),
    ] {
        let all = all_shardings(&mesh, 2, &[]);
        let mut n = 0;
        for shape in [[12, 24], [17, 5], [1, 7], [0, 3]] {
            for from in &all {
                let locals = scattered(from, &shape, &mesh);
                for to in &all {
                    let Some(kind) = classify(from, to, &shape, &mesh) else { continue };
                    let step = Step { kind, to: to.clone() };
                    let out = apply_step(&step, from, &shape, &mesh, &locals);
                    assert_eq!(out, scattered(to, &shape, &mesh), "{from:?} {step:?}");
                    n += 1;
                }
            }
        }
        assert!(n > 100);
    }
}

/// The bytes that are charged are those that the definition of the step moves: exactly for gathers
/// and all-to-alls of even pieces, at most for a permute, where some may stay.
#[test]
fn charged_bytes_are_moved_bytes() {
    let mesh = Mesh::new(&[("x", 4), ("y", 2)]);
    let shape = [16, 32];
    let all = all_shardings(&mesh, 2, &[]);
    for from in &all {
        for to in &all {
            let Some(kind) = classify(from, to, &shape, &mesh) else { continue };
            let step = Step { kind, to: to.clone() };
            let charged = step_bytes(&step, from, &shape, 2, &mesh);
            for dst in mesh.coords() {
                let others = mesh.group_of(kind.axes(), &dst).filter(|src| *src != dst);
                let elements = |src: &[u32]| -> u64 {
                    let runs = |dim: usize| {
                        copy_runs(&from.dims[dim], &to.dims[dim], shape[dim], &mesh, src, &dst)
                    };
                    (0..2).map(|dim| runs(dim).iter().map(|it| it.2).sum::<u64>()).product()
                };
                let moved = 2.0 * others.map(|it| elements(&it)).sum::<u64>() as f64;
                match kind {
                    StepKind::AllGather { .. } | StepKind::AllToAll { .. } => {
                        assert_eq!(moved, charged, "{from:?} {step:?}");
                    }
                    StepKind::Permute { .. } => assert!(moved <= charged, "{from:?} {step:?}"),
                    StepKind::Slice { .. } => assert_eq!(charged, 0.0),
                    other => panic!("nothing is partial here: {other:?}"),
                }
            }
        }
    }
}

#[track_caller]
fn check(mesh: &Mesh, from: &str, to: &str, shape: &[u64], cost: CommCost, expected: &[&str]) {
    let steps = reshard(&parse(from, mesh), &parse(to, mesh), shape, 4, mesh, &cost).unwrap();
    let names = |it: AxisSet| mesh.names(it);
    let text = |step: &Step| {
        let kind = match step.kind {
            StepKind::AllGather { dim, axes } => format!("all_gather {dim} {}", names(axes)),
            StepKind::ReduceScatter { dim, axes, op } => {
                format!("reduce_scatter {op} {dim} {}", names(axes))
            }
            StepKind::AllReduce { axes, op } => format!("all_reduce {op} {}", names(axes)),
            StepKind::AllToAll { axes, from_dim, to_dim } => {
                format!("all_to_all {from_dim} {to_dim} {}", names(axes))
            }
            StepKind::Permute { axes } => format!("permute {}", names(axes)),
            StepKind::Slice { dim, axes } => format!("slice {dim} {}", names(axes)),
            StepKind::ToPartial { axes, op } => format!("to_partial {op} {}", names(axes)),
        };
        format!("{kind} -> {}", step.to.display(mesh))
    };
    assert_eq!(steps.iter().map(text).collect::<Vec<_>>(), expected);
}

const LATENCY: CommCost = COSTS[0];
const BANDWIDTH: CommCost = COSTS[1];

#[test]
fn everyday_moves_are_what_one_expects() {
    let mesh = Mesh::new(&[("dp", 2), ("tp", 4)]);
    let check = |from, to, expected: &[&str]| {
        check(&mesh, from, to, &[64, 64], CommCost::default(), expected);
    };
    check("[tp, _]", "[tp, _]", &[]);
    // FSDP gathers a weight and scatters its gradient.
    check("[tp.dp, _]", "[tp, _]", &["all_gather 0 dp -> [tp, _]"]);
    check("[tp, _] sum(dp)", "[tp.dp, _]", &["reduce_scatter sum 0 dp -> [tp.dp, _]"]);
    check("[_, _] avg(dp)", "[_, _]", &["all_reduce avg dp -> [_, _]"]);
    // Several axes go in one collective.
    check("[tp.dp, _]", "[_, _]", &["all_gather 0 dp, tp -> [_, _]"]);
    check("[_, _] sum(dp, tp)", "[tp.dp, _]", &["reduce_scatter sum 0 dp, tp -> [tp.dp, _]"]);
    check("[_, _] sum(dp, tp)", "[_, _]", &["all_reduce sum dp, tp -> [_, _]"]);
    check("[_, _]", "[tp.dp, _]", &["slice 0 dp, tp -> [tp.dp, _]"]);
    check("[_, _]", "[tp, dp]", &["slice 0 tp -> [tp, _]", "slice 1 dp -> [tp, dp]"]);
    check("[tp, _]", "[_, tp]", &["all_to_all 0 1 tp -> [_, tp]"]);
    check("[dp.tp, _]", "[tp.dp, _]", &["permute dp, tp -> [tp.dp, _]"]);
    // A fused weight's segments become plain rows without a gather.
    check("[x2.tp, _]", "[tp, _]", &["permute tp -> [tp, _]"]);
    check("[_, _]", "[x2.tp, _]", &["slice 0 tp -> [x2.tp, _]"]);
    check("[_, _] sum(tp)", "[x2.tp, _]", &["reduce_scatter sum 0 tp -> [x2.tp, _]"]);
    check("[_, _]", "[_, _] sum(tp)", &["to_partial sum tp -> [_, _] sum(tp)"]);
    check("[_, _] sum(dp)", "[_, _] sum(dp, tp)", &["to_partial sum tp -> [_, _] sum(dp, tp)"]);
}

#[test]
fn hybrid_sharded_gradients_are_scattered_before_they_are_reduced() {
    let mesh = Mesh::new(&[("dp_replicate", 2), ("dp_shard", 4)]);
    let check = |cost, expected: &[&str]| {
        check(&mesh, "[_] sum(dp_replicate, dp_shard)", "[dp_shard]", &[64], cost, expected);
    };
    check(
        BANDWIDTH,
        &[
            "reduce_scatter sum 0 dp_shard -> [dp_shard] sum(dp_replicate)",
            "all_reduce sum dp_replicate -> [dp_shard]",
        ],
    );
    check(
        LATENCY,
        &["all_reduce sum dp_replicate, dp_shard -> [_]", "slice 0 dp_shard -> [dp_shard]"],
    );
}

#[test]
fn copies_over_an_idle_axis_share_a_large_reduction() {
    let mesh = Mesh::new(&[("dp", 2), ("tp", 4)]);
    let steps = [
        "slice 0 dp -> [dp] sum(tp)",
        "reduce_scatter sum 0 tp -> [dp.tp]",
        "all_gather 0 dp, tp -> [_]",
    ];
    check(&mesh, "[_] sum(tp)", "[_]", &[64], BANDWIDTH, &steps);
    check(&mesh, "[_] sum(tp)", "[_]", &[64], LATENCY, &["all_reduce sum tp -> [_]"]);
}

#[test]
fn part_of_a_refined_axis_comes_off_alone_where_it_cuts_evenly() {
    let mesh = Mesh::new(&[("tp", 4)]).refine("tp", 2, "kv", "rep").unwrap();
    check(&mesh, "[kv.rep]", "[kv]", &[8], LATENCY, &["all_gather 0 rep -> [kv]"]);
    // 5 rows over 4 are 2 2 1 0, over 2 are 3 2: row 2 changes sides.
    let steps = ["all_gather 0 kv, rep -> [_]", "slice 0 kv -> [kv]"];
    check(&mesh, "[kv.rep]", "[kv]", &[5], LATENCY, &steps);
}

/// 10 blocks of 128 over 4: 384 384 384 128.
#[test]
fn rounded_cuts_are_moved_like_others() {
    let mesh = Mesh::new(&[("dp_out", 2), ("dp", 4), ("tp", 2)]);
    let shape = [2 * 1280, 4096];
    let stored = "[tp.dp%128, _]";
    check(&mesh, stored, "[tp, _]", &shape, LATENCY, &["all_gather 0 dp -> [tp, _]"]);
    check(&mesh, "[tp, _]", stored, &shape, LATENCY, &["slice 0 dp -> [tp.dp%128, _]"]);
    let steps = ["reduce_scatter sum 0 dp -> [tp.dp%128, _]"];
    check(&mesh, "[tp, _] sum(dp)", stored, &shape, LATENCY, &steps);
    let steps = [
        "reduce_scatter sum 0 dp -> [tp.dp%128, _] sum(dp_out)",
        "all_reduce sum dp_out -> [tp.dp%128, _]",
    ];
    check(&mesh, "[tp, _] sum(dp_out, dp)", stored, &shape, CommCost::default(), &steps);
    // Every rank's piece but the last begins elsewhere.
    let steps = ["permute dp -> [tp.dp%128, _]"];
    check(&mesh, "[tp.dp, _]", stored, &shape, LATENCY, &steps);
    let [even, stored] = ["[tp.dp, _]", stored].map(|it| parse(it, &mesh));
    let steps = reshard(&even, &stored, &shape, 4, &mesh, &LATENCY).unwrap();
    // 320 rows of 4096 numbers of 4 bytes.
    assert_eq!(step_bytes(&steps[0], &even, &shape, 4, &mesh), 320.0 * 4096.0 * 4.0);
    // 8 blocks: a granule that rounds nothing is another layout all the same.
    check(&mesh, "[dp, _]", "[dp%128, _]", &[1024, 64], LATENCY, &["permute dp -> [dp%128, _]"]);
}

/// A search looks at a bounded number of moves, however many axes there are.
#[test]
fn many_axes_are_resharded_too() {
    let names: Vec<String> = (0..12).map(|it| format!("a{it}")).collect();
    let axes: Vec<(&str, u32)> = names.iter().map(|it| (it.as_str(), 2)).collect();
    let mesh = Mesh::new(&axes);
    let shape = [1 << 12; 3];
    for (from, to) in [
        ("[a0.a1.a2.a3.a4.a5, a6.a7.a8, a9.a10.a11]", "[a11.a10, a9.a8.a7, a6.a5.a4.a3.a2.a1.a0]"),
        ("[a0.a1.a2.a3.a4.a5, a6, _]", "[_, a5, a3] sum(a7, a8, a9, a10)"),
        ("[_, _, _] sum(a0, a1, a2, a3, a4, a5, a6, a7)", "[a7.a6.a5, a4.a3.a2, a1]"),
    ] {
        let (from, to) = (parse(from, &mesh), parse(to, &mesh));
        let steps = reshard(&from, &to, &shape, 4, &mesh, &BANDWIDTH).unwrap();
        assert!(total(&from, &steps, &shape, &mesh, &BANDWIDTH) > 0.0);
        assert_eq!(steps.last().map(|it| &it.to), Some(&to));
    }
}

fn digits() -> impl Strategy<Value = Vec<Digit>> {
    let axes = Just((0..3).map(|it| Digit::Axis(Axis(it))).collect::<Vec<_>>()).prop_shuffle();
    let blocks = prop::collection::vec(1..=3_u32, 3);
    (axes, blocks, 0..=3_usize).prop_map(|(axes, blocks, n)| {
        let pairs = blocks.into_iter().zip(axes).take(n);
        pairs.flat_map(|(block, axis)| [Digit::Block(block), axis]).collect()
    })
}

/// A sharding of two dimensions: one order of axes and blocks, dealt out, in granules.
fn shardings() -> impl Strategy<Value = Sharding> {
    let partial = prop::option::of(prop::sample::select(&ReduceOp::ALL[..]));
    let granules = (1..=3_u32, 1..=2_u32);
    (digits(), granules, 0..=6_usize, partial).prop_map(|(digits, granules, at, op)| {
        let (a, b) = digits.split_at(at.min(digits.len()));
        let dims = [(a, granules.0), (b, granules.1)];
        let dims = dims.map(|(it, n)| DimLayout::new(it.to_vec()).in_granules(n));
        let res = Sharding { dims: dims.into_iter().collect(), partial: None };
        let free = (0..3).map(Axis).filter(|&it| !res.sharded_axes().contains(it));
        match op {
            Some(op) => res.with_partial(op, free.collect()),
            None => res,
        }
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// Values after a search are those of the definition, with blocks, partial values and uneven
    /// sizes on three axes.
    #[test]
    fn any_resharding_keeps_the_value(
        from in shardings(), to in shardings(), a in 0..14_u64, b in 0..14_u64, cost in 0..4_usize
    ) {
        let mesh = Mesh::new(&[("x", 2), ("y", 3), ("z", 2)]);
        let granules = |dim: usize| [&from, &to].map(|it| u64::from(it.dims[dim].granule()));
        let fitting = |dim: usize, size: u64| match granules(dim) {
            [1, n] | [n, 1] => size.next_multiple_of(n),
            [a, b] => size.next_multiple_of(a * b),
        };
        let shape = [fitting(0, a), fitting(1, b)];
        let steps = reshard(&from, &to, &shape, 4, &mesh, &COSTS[cost]).unwrap();
        prop_assert!(total(&from, &steps, &shape, &mesh, &COSTS[cost]).is_finite());
        let whole = Sharding::replicated(2);
        let value = |sharding: &Sharding, locals: Vec<Vec<f64>>| {
            let steps = reshard(sharding, &whole, &shape, 4, &mesh, &COSTS[0]).unwrap();
            apply_steps(&steps, sharding, &shape, &mesh, locals)
        };
        let close = |a: &[Vec<f64>], b: &[Vec<f64>]| {
            a.concat().iter().zip(b.concat()).all(|(a, b)| (a - b).abs() <= 1e-9 * b.abs())
        };
        // Parts of a reduction that differ by coordinate.
        let mut locals = scattered(&from.without_partial(), &shape, &mesh);
        for (coord, local) in mesh.coords().zip(&mut locals) {
            let index = mesh.index_in(from.partial_axes(), &coord) as f64;
            local.iter_mut().for_each(|it| *it += 100.0 * index);
        }
        let expected = value(&from, locals.clone());
        let out = apply_steps(&steps, &from, &shape, &mesh, locals);
        prop_assert!(close(&value(&to, out.clone()), &expected), "{steps:?}");
        if to.partial.is_none() {
            let whole_to: Vec<Vec<f64>> = scattered(&to, &shape, &mesh)
                .into_iter()
                .map(|it| it.into_iter().map(|at| expected[0][at as usize]).collect())
                .collect();
            prop_assert!(close(&out, &whole_to), "{steps:?}");
        }
    }
}
