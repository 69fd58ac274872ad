//! Every move between layouts gives each rank what the placement algebra says.

use ir::ops::CollectiveKind;
use ir::placement::{
    CommCost, DimLayout, Mesh, Sharding, Step, apply_steps, copy_runs, for_each_copy, reshard,
};
use ir::plan::{Buffer, Role};
use ir::{DType, TensorType};

use crate::build::{PlanBuilder, bits, mesh, session, session_with_order};

const SHARDINGS: &[&str] = &[
    "[_, _]",
    "[dp, _]",
    "[tp, _]",
    "[_, dp]",
    "[dp.tp, _]",
    "[tp.dp, _]",
    "[dp, tp]",
    "[tp, dp]",
    "[_, tp.dp]",
    "[x2.tp, _]",
    "[_, _] sum(tp)",
    "[_, _] sum(dp, tp)",
    "[dp, _] sum(tp)",
    "[_, tp] sum(dp)",
    "[_, _] avg(dp, tp)",
    "[_, tp] avg(dp)",
    "[_, _] max(tp)",
    "[_, _] min(dp, tp)",
];

/// What each rank holds, compact: small integers, so that all sums are exact in every dtype.
fn locals(sharding: &Sharding, shape: &[u64], mesh: &Mesh) -> Vec<Vec<f64>> {
    let local = |coord: &[u32]| {
        let part = mesh.index_in(sharding.partial_axes(), coord);
        let extents = sharding.extents(shape, mesh, coord);
        let mut res = vec![0.0; extents.iter().product::<u64>() as usize];
        let whole = DimLayout::whole();
        let dims = sharding.dims.iter().zip(shape);
        let runs: Vec<_> =
            dims.map(|(it, &size)| copy_runs(&whole, it, size, mesh, coord, coord)).collect();
        for_each_copy(shape, &extents, &runs, |from, to, len| {
            for i in 0..len {
                let value = ((from + i) * 5 + part * 3) % 13;
                res[(to + i) as usize] = value as f64 - 6.0;
            }
        });
        res
    };
    mesh.coords().map(|it| local(&it)).collect()
}

/// The buffers of all ranks, padded, one after the other.
fn padded(locals: &[Vec<f64>], sharding: &Sharding, shape: &[u64], mesh: &Mesh) -> Vec<f32> {
    let local_shape = sharding.local_shape(shape, mesh);
    let n: u64 = local_shape.iter().product();
    let mut res = Vec::new();
    for (coord, local) in mesh.coords().zip(locals) {
        let extents = sharding.extents(shape, mesh, &coord);
        let mut buffer = vec![0.0; n as usize];
        let runs: Vec<_> = extents.iter().map(|&it| [(0, 0, it)].into_iter().collect()).collect();
        for_each_copy(&extents, &local_shape, &runs, |from, to, len| {
            for i in 0..len as usize {
                buffer[to as usize + i] = local[from as usize + i] as f32;
            }
        });
        res.extend(buffer);
    }
    res
}

struct Case {
    name: String,
    from: Sharding,
    to: Sharding,
    steps: Vec<Step>,
}

/// All pairs of layouts between which a tensor of `shape` can be moved.
fn cases(shape: &[u64], mesh: &Mesh) -> Vec<Case> {
    let valid = |it: &&str| Sharding::parse(it, mesh).is_ok();
    let texts: Vec<&str> = SHARDINGS.iter().copied().filter(valid).collect();
    let mut res = Vec::new();
    for from_text in &texts {
        for to_text in &texts {
            let parse = |it: &str| Sharding::parse(it, mesh).expect("checked");
            let (from, to) = (parse(from_text), parse(to_text));
            let cost = CommCost::default();
            let Ok(steps) = reshard(&from, &to, shape, 4, mesh, &cost) else { continue };
            res.push(Case { name: format!("{from_text} -> {to_text}"), from, to, steps });
        }
    }
    res
}

fn add_steps(builder: &mut PlanBuilder, case: &Case, ty: &TensorType, src: Buffer) -> Buffer {
    let mut at = src;
    for (i, step) in case.steps.iter().enumerate() {
        let name = format!("{} #{i}", case.name);
        let next = builder.buffer_at(&name, Role::Temp, ty.clone(), step.to.clone());
        let comm = builder.plan.comms.push(step.kind.axes());
        builder.collective(CollectiveKind::from(step.kind), comm, &[(at, next)]);
        at = next;
    }
    at
}

#[track_caller]
fn check(mesh_text: &str, shape: &[u64], dtype: DType) -> usize {
    let mesh = mesh(mesh_text);
    let ty = TensorType::new(dtype, shape);
    let mut builder = PlanBuilder::new(mesh.clone());
    let cases = cases(shape, &mesh);
    let cases: Vec<Case> = cases
        .into_iter()
        .filter(|it| dtype != DType::I32 || it.from.partial.is_none() && it.to.partial.is_none())
        .collect();
    for case in &cases {
        let src = builder.buffer_at(&case.name, Role::Temp, ty.clone(), case.from.clone());
        let given = builder.by_rank(&format!("{} in", case.name), src);
        builder.copy(given, src);
        let dst = add_steps(&mut builder, case, &ty, src);
        let out = builder.by_rank(&format!("{} out", case.name), dst);
        builder.copy(dst, out);
    }
    let session = session(&builder.plan);
    for case in &cases {
        let locals = locals(&case.from, shape, &mesh);
        let values = padded(&locals, &case.from, shape, &mesh);
        session.write(&format!("{} in", case.name), &values).expect("written");
    }
    session.micro_batch(&Default::default(), 1, 0).unwrap_or_else(|it| panic!("{it}"));
    for case in &cases {
        let locals = locals(&case.from, shape, &mesh);
        let expect = apply_steps(&case.steps, &case.from, shape, &mesh, locals);
        let expect = padded(&expect, &case.to, shape, &mesh);
        let found = session.read(&format!("{} out", case.name)).expect("read").data;
        assert_eq!(found, expect, "{mesh_text} {ty} {}: {:?}", case.name, case.steps);
    }
    cases.len()
}

/// Divisible, uneven, empty shards, dimensions of 1 and of 0.
#[test]
fn collectives_equal_the_algebra() {
    let mut n = 0;
    for shape in [[8, 8], [7, 5], [3, 1], [1, 9], [0, 4]] {
        n += check("1x1", &shape, DType::F32);
        n += check("2x2", &shape, DType::F32);
        n += check("2x4", &shape, DType::F32);
        n += check("3x2", &shape, DType::F32);
    }
    n += check("1", &[4, 3], DType::F32);
    n += check("4", &[7, 3], DType::F32);
    assert!(n > 3000, "only {n} cases");
}

#[test]
fn other_dtypes_move_likewise() {
    check("2x4", &[7, 5], DType::Bf16);
    check("2x4", &[7, 5], DType::I32);
}

/// Integers that f32 does not have are moved as they are.
#[test]
fn integers_stay_exact() {
    let mut builder = PlanBuilder::new(mesh("4"));
    let ids = builder.buffer("tokens", Role::Input, DType::I32, &[1, 5], "[_, dp]");
    let full = builder.buffer("full", Role::Carried, DType::I32, &[1, 5], "[_, _]");
    let comm = builder.comm(&["dp"]);
    builder.collective(CollectiveKind::AllGather, comm, &[(ids, full)]);
    builder.plan.run.vocab = 1 << 31;
    let session = session(&builder.plan);
    let tokens = vec![(1 << 24) + 1, 0, 1, 2, i32::MAX - 7];
    let batch = runtime::Batch { tokens, labels: vec![] };
    session.micro_batch(&batch, 1, 0).expect("runs");
    // As f32 they would be one less and seven more; reading rounds, so compare what is left of them.
    let found = session.read_integers("full").expect("read");
    assert_eq!(found, batch.tokens);
}

/// Values whose sum depends on the order.
fn rough(n: usize) -> Vec<f32> {
    (0..n).map(|i| ((i * 2_654_435_761) % 1_000_003) as f32 * 1e-3 - 317.7).collect()
}

fn reduction(dtype: DType) -> (PlanBuilder, usize) {
    let mut builder = PlanBuilder::new(mesh("2x4"));
    let ty = TensorType::new(dtype, &[11, 3]);
    let partial = Sharding::parse("[_, _] sum(dp, tp)", &builder.plan.mesh).expect("a sharding");
    let src = builder.buffer_at("src", Role::Temp, ty.clone(), partial);
    let given = builder.by_rank("in", src);
    builder.copy(given, src);
    let comm = builder.comm(&["dp", "tp"]);
    let reduced = builder.buffer("reduced", Role::Carried, dtype, &[11, 3], "[_, _]");
    let sum = ir::placement::ReduceOp::Sum;
    builder.collective(CollectiveKind::AllReduce(sum), comm, &[(src, reduced)]);
    let scattered = builder.buffer("scattered", Role::Carried, dtype, &[11, 3], "[dp.tp, _]");
    builder.collective(CollectiveKind::ReduceScatter(sum), comm, &[(src, scattered)]);
    (builder, 33)
}

/// Sums are in coordinate order, in f32, rounded once, whatever the timing of threads.
#[test]
fn reductions_are_reproducible_and_rounded_once() {
    for dtype in [DType::F32, DType::Bf16] {
        let (builder, n) = reduction(dtype);
        let round = |it: f32| match dtype {
            DType::Bf16 => half::bf16::from_f32(it).to_f32(),
            _ => it,
        };
        let values: Vec<f32> = rough(8 * n).into_iter().map(round).collect();
        let sum = |i: usize| (1..8).fold(values[i], |acc, rank| acc + values[rank * n + i]);
        let expect: Vec<f32> = (0..n).map(|i| round(sum(i))).collect();
        for order_seed in 0..10 {
            let session = session_with_order(&builder.plan, order_seed);
            session.write("in", &values).expect("written");
            for step in 1..5 {
                session.start_step(0.0).expect("runs");
                session.micro_batch(&Default::default(), step, 0).expect("runs");
                for name in ["reduced", "scattered"] {
                    let found = session.read(name).expect("read").data;
                    assert_eq!(bits(&found), bits(&expect), "{dtype} {name}");
                }
            }
        }
    }
}

/// NaN of one rank is not hidden by a maximum.
#[test]
fn maximum_keeps_nan() {
    let mut builder = PlanBuilder::new(mesh("4"));
    let src = builder.buffer("src", Role::Temp, DType::F32, &[1], "[_] max(dp)");
    let given = builder.by_rank("in", src);
    builder.copy(given, src);
    let out = builder.buffer("out", Role::Carried, DType::F32, &[1], "[_]");
    let comm = builder.comm(&["dp"]);
    let max = ir::placement::ReduceOp::Max;
    builder.collective(CollectiveKind::AllReduce(max), comm, &[(src, out)]);
    let session = session(&builder.plan);
    for at in 0..4 {
        let mut values = vec![1.0, 2.0, -3.0, 0.0];
        values[at] = f32::NAN;
        session.write("in", &values).expect("written");
        session.micro_batch(&Default::default(), 1, 0).expect("runs");
        assert!(session.read("out").expect("read").data[0].is_nan());
    }
}

/// All parts of a call move, each by its own layouts, with ranks that hold nothing of some.
#[test]
fn one_call_moves_many_parts() {
    let mut builder = PlanBuilder::new(mesh("2x4"));
    let mut parts = Vec::new();
    for (i, (shape, from, to)) in [
        (vec![9, 2], "[dp.tp, _]", "[dp, _]"),
        (vec![2, 5], "[_, tp]", "[_, _]"),
        (vec![3], "[tp]", "[_]"),
        (vec![1], "[tp]", "[_]"),
    ]
    .into_iter()
    .enumerate()
    {
        let src = builder.buffer(&format!("src{i}"), Role::State, DType::F32, &shape, from);
        let dst = builder.buffer(&format!("dst{i}"), Role::Carried, DType::F32, &shape, to);
        parts.push((src, dst));
    }
    let comm = builder.comm(&["tp"]);
    builder.collective(CollectiveKind::AllGather, comm, &parts);
    let session = session(&builder.plan);
    let values = |i: usize| {
        let n = builder.plan.buffers[parts[i].0].ty.n_elements() as usize;
        rough(n)
    };
    for i in 0..parts.len() {
        session.write(&format!("src{i}"), &values(i)).expect("written");
    }
    session.micro_batch(&Default::default(), 1, 0).expect("runs");
    for i in 0..parts.len() {
        let found = session.read(&format!("dst{i}")).expect("read").data;
        assert_eq!(found, values(i), "part {i}");
    }
}
