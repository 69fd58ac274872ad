//! Every op's programs fit their kernels: entries, parameters, pointers, grids.

use ir::TensorType;
use ir::ops::{
    Along, Amax, Amaxes, BoundAt, Copies, Granule, Matmul, OpKind, QuantMatmul, Quantize,
    QuantizeBlock, RmsNormGrad, Rope, RoundNvFp4, Sample, SumLeading,
};

use super::*;

fn operand(ty: &TensorType) -> Operand {
    Operand { dtype: ty.dtype, shape: ty.shape.iter().map(|&it| it as usize).collect() }
}

/// What `sample` does on one rank that holds everything.
#[track_caller]
fn lowered(sample: &Sample) -> Program {
    let types: Vec<&TensorType> = sample.inputs.iter().map(|it| &it.ty).collect();
    let results = sample.op.infer(&types).expect("a sample is well-typed");
    let size = |at: BoundAt| match at {
        BoundAt::Input(i, dim) => types[i].shape[dim],
        BoundAt::Result(i, dim) => results[i].shape[dim],
    };
    let bounds: Vec<LocalBound> = sample
        .op
        .bounds(&types)
        .into_iter()
        .map(|it| LocalBound { start: 0, extent: size(it), size: size(it) })
        .collect();
    let args: Vec<Operand> = types.iter().map(|it| operand(it)).collect();
    let results: Vec<Operand> = results.iter().map(operand).collect();
    let call = OpCall { op: &sample.op, args: &args, results: &results, bounds: &bounds };
    let res = lower(&[call]).unwrap_or_else(|it| panic!("{it}"));
    check(&res, args.len(), results.len());
    res
}

/// Whether `program` can run on so many operands and results.
#[track_caller]
fn check(program: &Program, n_args: usize, n_results: usize) {
    assert_eq!(program.workspace % 256, 0, "{program:?}");
    let fits = |at: Pointer| match at {
        Pointer::Arg(i) => (i as usize) < n_args,
        Pointer::Result(i) => (i as usize) < n_results,
        Pointer::Workspace(byte) => byte < program.workspace,
        Pointer::Table(word) => u64::from(word) < program.table_words(),
    };
    for word in &program.table {
        if let Word::Pointer(at) = word {
            assert!(fits(*at), "{at:?} in the table of {program:?}");
        }
    }
    for work in &program.work {
        let pointers = pointers(work);
        assert!(pointers.iter().all(|&it| fits(it)), "{work:?} of {program:?}");
    }
}

/// What `work` touches, which is checked for the rest.
#[track_caller]
fn pointers(work: &Work) -> Vec<Pointer> {
    match work {
        Work::Launch(launch) => {
            check_launch(launch);
            let pointer = |it: &Arg| if let Arg::Pointer(at) = it { Some(*at) } else { None };
            launch.args.iter().filter_map(pointer).collect()
        }
        Work::Gemm(it) => {
            assert!(it.m > 0 && it.n > 0 && it.k > 0, "{it:?}");
            let scales = it.scales.map_or([None; 2], |it| [it.a, it.b].map(|it| Some(it.at)));
            let optional = [it.c, it.bias, it.gelu].into_iter().chain(scales).flatten();
            [it.a.at, it.b.at, it.out].into_iter().chain(optional).collect()
        }
        Work::Attention(it) => {
            let own = it.args.iter().chain(&it.results).copied();
            own.chain(it.fallback.iter().flat_map(pointers)).collect()
        }
        Work::Fill { to, bytes, .. } => {
            assert!(*bytes > 0, "{work:?}");
            vec![*to]
        }
        Work::Copy { from, to, bytes } => {
            assert!(*bytes > 0, "{work:?}");
            vec![*from, *to]
        }
    }
}

#[track_caller]
fn check_launch(launch: &Launch) {
    let Launch { function, grid, block, shared, args } = launch;
    assert!(grid.iter().all(|&it| it > 0) && grid[0] < 1 << 31, "{launch:?}");
    assert!(grid[1] <= 65535 && grid[2] <= 65535, "{launch:?}");
    // What all architectures have, without what a kernel declares itself and the system takes.
    assert!((1..=1024).contains(block) && *shared <= 96 << 10, "{launch:?}");
    let params = parameters(function);
    assert_eq!(params.len(), args.len(), "{params:?} of {launch:?}");
    for (param, arg) in params.iter().zip(args) {
        let fits = match arg {
            Arg::Pointer(_) => param == "*",
            // A null pointer; the bits of an f64.
            Arg::I64(0) if param == "*" => true,
            Arg::I64(_) => ["i64", "u64", "f64"].contains(&param.as_str()),
            Arg::I32(_) => param == "int",
            Arg::U32(_) => param == "u32",
            Arg::F32(_) => param == "float",
        };
        assert!(fits, "{arg:?} for `{param}` of {launch:?}");
    }
}

/// Types of a kernel's parameters, read from its source: a name, or `*` for a pointer.
#[track_caller]
fn parameters(function: &Function) -> Vec<String> {
    let source = SOURCES.iter().find(|it| it.0 == function.source);
    let text = source.unwrap_or_else(|| panic!("no source `{}`", function.source)).1;
    let kernels = text.split("extern \"C\" __global__ void").skip(1);
    let heads = kernels.filter_map(|it| it.split_once('{')).map(|it| it.0);
    // The last opening bracket is that of the parameters: launch bounds come before.
    let mut found = heads.filter_map(|it| it.rsplit_once('('));
    let name = |head: &str| head.trim_end().rsplit([' ', '\n']).next() == Some(function.entry);
    let (_, params) = found
        .find(|it| name(it.0))
        .unwrap_or_else(|| panic!("no entry `{}` in `{}`", function.entry, function.source));
    let params = params.split_once(')').expect("parameters end").0;
    params.split(',').map(|it| parameter(it, &function.defines)).collect()
}

fn parameter(text: &str, defines: &[String]) -> String {
    if text.contains('*') {
        return "*".into();
    }
    let name = text.split_whitespace().rev().nth(1).expect("a type and a name");
    let value = defines.iter().filter_map(|it| it.split_once('=')).find(|it| it.0 == name);
    match value.map_or(name, |it| it.1) {
        "long" => "i64".into(),
        "double" => "f64".into(),
        other => other.into(),
    }
}

fn fused(body: &str) -> Op {
    Op::from_text(&format!("fused(body:\"{body}\")")).unwrap_or_else(|it| panic!("{body}: {it}"))
}

/// The same with all real operands in `dtype`.
fn in_dtype(mut sample: Sample, dtype: DType) -> Sample {
    let real = sample.inputs.iter_mut().filter(|it| it.ty.dtype.is_float());
    real.for_each(|it| it.ty.dtype = dtype);
    sample
}

#[test]
fn programs_of_all_samples_fit_their_kernels() {
    let moved = |it: &OpKind| matches!(it, OpKind::Collective | OpKind::Reshard);
    for &kind in OpKind::ALL.iter().filter(|it| !moved(it)) {
        // A rank that holds several pieces takes amaxes by `amax`.
        let number = |it: &Op| !matches!(it, Op::Amax(it) if it.pieces.iter().any(|it| it.1 != 1));
        let of_a_rank = |it: &Sample| match it.op {
            Op::Fused(_) => runs(&it.op) && it.op.parts().all(number),
            _ => it.op.amaxes().is_none_or(Amaxes::are_numbers),
        };
        for sample in kind.samples().into_iter().filter(of_a_rank) {
            lowered(&sample);
            // A body has types of its own.
            if kind != OpKind::Fused {
                sample.in_bf16().iter().for_each(|it| drop(lowered(it)));
            }
        }
    }
}

#[test]
fn a_sum_of_many_scalars_has_a_block_for_each_element() {
    let shapes: Vec<&[u64]> = vec![&[]; 300];
    let program = lowered(&Sample::floats(ir::ops::Add {}, &shapes));
    let [Work::Launch(launch)] = program.work.as_slice() else { panic!("{program:?}") };
    assert_eq!((launch.function.entry, launch.grid), ("add_scalars", [1, 1, 1]));
    assert_eq!(program.table.len(), 600);
}

/// 256 KiB a row: 96 of them wait in shared memory, and three numbers a token in the workspace.
#[test]
fn a_cross_entropy_keeps_a_part_of_each_row() {
    let op = ir::ops::CrossEntropy { ignore_index: -100, label_smoothing: 0.0.into() };
    let sample = |n| Sample::floats(op.clone(), &[&[n, 128_256], &[n]]);
    let fill = |n| sample(n).fill(1, ir::ops::Values::Ids(128_256));
    let program = lowered(&in_dtype(fill(100), DType::Bf16));
    let [Work::Launch(rows), Work::Launch(loss)] = program.work.as_slice() else {
        panic!("{program:?}")
    };
    assert_eq!((rows.grid, rows.block, rows.shared), ([100, 1, 1], 1024, 96 << 10));
    assert_eq!(rows.args[7], Arg::I32(6144), "vectors of 8");
    assert_eq!(loss.args[..2], [0, 512].map(|it| Arg::Pointer(Pointer::Workspace(it))));
    assert_eq!(program.workspace, 3 * 512);
    let none = lowered(&in_dtype(fill(0), DType::Bf16));
    let [Work::Launch(loss)] = none.work.as_slice() else { panic!("{none:?}") };
    assert_eq!(loss.function.entry, "ce_loss");
}

#[test]
fn a_gradient_gives_the_glu_in_the_same_launch() {
    let op = fused(
        "(bf16, bf16, bf16) { %3, %4 = glu_grad(kind:swiglu) %0, %1, %2; %5 = glu(kind:swiglu) %1, %2; \
         return %3, %4, %5 }",
    );
    let shape: &[u64] = &[8192, 14336];
    let program = lowered(&in_dtype(Sample::floats(op, &[shape; 3]), DType::Bf16));
    let [Work::Launch(launch)] = program.work.as_slice() else { panic!("{program:?}") };
    assert_eq!(launch.function.entry, "glu_grad_recompute");
    let results = [0, 1, 2].map(|it| Arg::Pointer(Pointer::Result(it)));
    assert_eq!(launch.args[..3], results);
}

#[test]
fn a_norm_gradient_sums_weights_in_parts() {
    let shapes: [&[u64]; 4] = [&[8192, 4096], &[8192, 4096], &[4096], &[8192]];
    let program = lowered(&Sample::floats(RmsNormGrad::default(), &shapes));
    let [Work::Launch(parts), Work::Launch(sum)] = program.work.as_slice() else {
        panic!("{program:?}")
    };
    assert_eq!(program.workspace, u64::from(parts.grid[0]) * 4096 * 4);
    assert_eq!(sum.args[2], Arg::I64(i64::from(parts.grid[0])));
}

#[test]
fn sums_of_no_rows_are_zero() {
    let program = lowered(&Sample::floats(SumLeading::default(), &[&[0, 8]]));
    assert_eq!(program.work[..], [Work::Fill { to: Pointer::Result(0), bytes: 32, value: 0 }]);
    let shapes: [&[u64]; 4] = [&[0, 8], &[0, 8], &[8], &[0]];
    let program = lowered(&Sample::floats(RmsNormGrad::default(), &shapes));
    assert_eq!(program.work[..], [Work::Fill { to: Pointer::Result(1), bytes: 32, value: 0 }]);
}

#[test]
fn a_product_over_nothing_is_what_is_added_to_it() {
    let product = lowered(&Sample::floats(Matmul::default(), &[&[2, 0], &[0, 3]]));
    assert_eq!(product.work[..], [Work::Fill { to: Pointer::Result(0), bytes: 24, value: 0 }]);
    let op = Matmul { accumulate: true, bias: true, ..Matmul::default() };
    let added = lowered(&Sample::floats(op, &[&[2, 0], &[0, 3], &[2, 3], &[3]]));
    let copy = Work::Copy { from: Pointer::Arg(2), to: Pointer::Result(0), bytes: 24 };
    assert_eq!(added.work[0], copy);
    let Work::Launch(bias) = &added.work[1] else { panic!("{added:?}") };
    assert_eq!(bias.args[2], Arg::Pointer(Pointer::Arg(3)));
    let nothing = lowered(&Sample::floats(Matmul::default(), &[&[0, 4], &[4, 3]]));
    assert_eq!(nothing, Program::default());
}

#[test]
fn a_gemm_is_told_how_operands_are_stored() {
    let wgrad = Matmul { transpose_a: true, ..Matmul::default() };
    let program = lowered(&Sample::floats(wgrad, &[&[2, 4, 6], &[2, 4, 3]]));
    let [Work::Gemm(gemm)] = program.work.as_slice() else { panic!("{program:?}") };
    assert_eq!((gemm.m, gemm.n, gemm.k), (6, 3, 8));
    assert!(gemm.a.transposed && !gemm.b.transposed);
    assert_eq!(program.workspace, GEMM_WORKSPACE);
}

/// What a GEMM does not activate, a kernel does: from the sum, which is the second result.
#[test]
fn gelu_is_the_gemms_where_rows_are_aligned() {
    let fprop = Matmul { transpose_b: true, bias: true, gelu: true, ..Matmul::default() };
    let mlp = |k, n| Sample::floats(fprop.clone(), &[&[3, k], &[n, k], &[n]]);
    let program = lowered(&in_dtype(mlp(24, 16), DType::Bf16));
    let [Work::Gemm(gemm)] = program.work.as_slice() else { panic!("{program:?}") };
    assert_eq!((gemm.out, gemm.gelu), (Pointer::Result(0), Some(Pointer::Result(1))));
    let wide = Sample::floats(
        Matmul { out: Some(DType::F32), ..fprop.clone() },
        &[&[3, 24], &[16, 24], &[16]],
    );
    let mut wide = in_dtype(wide, DType::Bf16);
    wide.inputs[2].ty.dtype = DType::F32;
    let bf16 = |k, n| in_dtype(mlp(k, n), DType::Bf16);
    for (sample, bytes) in [(mlp(24, 16), 4), (bf16(20, 16), 2), (bf16(24, 12), 2), (wide, 4)] {
        let program = lowered(&sample);
        let [Work::Gemm(gemm), Work::Launch(launch)] = program.work.as_slice() else {
            panic!("{program:?}")
        };
        assert_eq!((gemm.out, gemm.gelu), (Pointer::Result(1), None));
        let n = gemm.m * gemm.n;
        let to_from = [Pointer::Result(0), Pointer::Result(1)].map(Arg::Pointer);
        let null = Arg::I64(0);
        assert_eq!(launch.args, [to_from[0], null, null, to_from[1], Arg::I64(n as i64)]);
        let dtype = if bytes == 2 { "X=bf16" } else { "X=f32" };
        assert_eq!(launch.function.defines[0], dtype);
    }
    // Nothing is contracted: the bias, activated.
    let program = lowered(&bf16(0, 16));
    let [Work::Fill { to, .. }, Work::Launch(bias), Work::Launch(gelu)] = program.work.as_slice()
    else {
        panic!("{program:?}")
    };
    assert_eq!(*to, Pointer::Result(1));
    assert_eq!([&bias.args[0], &gelu.args[3]], [&Arg::Pointer(Pointer::Result(1)); 2]);
    assert_eq!(gelu.args[0], Arg::Pointer(Pointer::Result(0)));
}

#[test]
fn rope_has_a_frequency_for_each_pair() {
    let op = Rope {
        head_dim: 128,
        theta: 5e5.into(),
        interleaved: false,
        scaling: None,
        inverse: false,
    };
    let program = lowered(&in_dtype(Sample::floats(op, &[&[1, 8192, 4096]]), DType::Bf16));
    assert_eq!(program.table.len(), 64);
    assert_eq!(program.table[0], Word::Value((1.0 / std::f64::consts::PI).to_bits()));
    let [Work::Launch(launch)] = program.work.as_slice() else { panic!("{program:?}") };
    // A thread turns 8 pairs: 4 positions of 8 heads at a time, of 8 threads each.
    assert_eq!((launch.block, launch.grid[0], launch.shared), (256, 2048, 4 * 64 * 8));
}

/// A number that blocks raise starts at zero, and no launch of its own follows.
#[test]
fn an_amax_of_a_result_is_zeroed_and_raised() {
    let op = fused(
        "(bf16, bf16, bf16) { %3, %4 = glu_grad(kind:swiglu) %0, %1, %2; %5 = amax %4; \
         return %3, %4, %5 }",
    );
    let shape: &[u64] = &[64, 96];
    let program = lowered(&in_dtype(Sample::floats(op, &[shape; 3]), DType::Bf16));
    let [zeroed, Work::Launch(launch)] = program.work.as_slice() else { panic!("{program:?}") };
    let amax = Pointer::Result(2);
    assert_eq!(*zeroed, Work::Fill { to: amax, bytes: 2, value: 0 });
    assert!(launch.function.defines.contains(&"AMAX=2".to_string()), "{launch:?}");
    assert_eq!(launch.args[2..4], [Arg::I64(0), Arg::Pointer(amax)]);
}

/// One launch more for all tensors of a batch, which may be empty.
#[test]
fn optimizers_take_the_amaxes_of_all_tensors_from_those_of_chunks() {
    let Op::AdamW(rest) = OpKind::AdamW.samples().remove(0).op else {
        unreachable!("a sample is of its op")
    };
    let op: Op = ir::ops::AdamW { amax: Amaxes { of: vec![0], pieces: Vec::new() }, ..rest }.into();
    let tensor =
        |shape: &[usize]| Operand { dtype: DType::F32, shape: SmallVec::from_slice(shape) };
    let program = |sizes: &[usize]| {
        let operands: Vec<[Vec<Operand>; 2]> = sizes
            .iter()
            .map(|&n| {
                let (x, scalar) = (|| tensor(&[n]), || tensor(&[]));
                let args = [vec![x(); 3], vec![scalar(), x()], vec![scalar(); 3]].concat();
                [args, [vec![x(); 3], vec![scalar(); 2]].concat()]
            })
            .collect();
        let calls: Vec<OpCall<'_>> = operands
            .iter()
            .map(|[args, results]| OpCall { op: &op, args, results, bounds: &[] })
            .collect();
        lower(&calls).expect("it has a kernel")
    };
    let two = program(&[100_000, 5]);
    let [Work::Launch(step), Work::Launch(largest), Work::Launch(count)] = two.work.as_slice()
    else {
        panic!("{two:?}")
    };
    assert_eq!((step.function.entry, step.grid), ("adamw", [5, 1, 1]));
    assert_eq!((largest.function.entry, largest.grid), ("largest", [2, 1, 1]));
    assert_eq!((count.function.entry, count.grid), ("count", [1, 1, 1]));
    assert_eq!(two.workspace, 256);
    // The amax, which chunk is the first, and the count of updates, of the second tensor.
    assert_eq!(two.table[14 + 8], Word::Pointer(Pointer::Result(9)));
    assert_eq!(two.table[14 + 11], Word::Value(4));
    assert_eq!(two.table[14 + 12], Word::Pointer(Pointer::Arg(11)));
    assert_eq!(two.table[14 + 13], Word::Pointer(Pointer::Result(8)));
    let none = program(&[0]);
    let [Work::Launch(largest), Work::Launch(count)] = none.work.as_slice() else {
        panic!("{none:?}")
    };
    assert_eq!((largest.function.entry, count.function.entry), ("largest", "count"));
}

#[test]
fn only_ops_that_a_table_can_hold_are_batched() {
    let op: Op = ir::ops::Add {}.into();
    let call = OpCall { op: &op, args: &[], results: &[], bounds: &[] };
    assert!(!batchable(&call, &call));
    let adamw = |beta1: f64, weight_decay: f64| -> Op {
        let (beta1, weight_decay) = (beta1.into(), weight_decay.into());
        let rest = OpKind::AdamW.samples().remove(0).op;
        let Op::AdamW(rest) = rest else { unreachable!("a sample is of its op") };
        ir::ops::AdamW { beta1, weight_decay, ..rest }.into()
    };
    let (a, b, c) = (adamw(0.9, 0.0), adamw(0.9, 0.1), adamw(0.8, 0.0));
    let call = |op| OpCall { op, args: &[], results: &[], bounds: &[] };
    assert!(batchable(&call(&a), &call(&b)));
    assert!(!batchable(&call(&a), &call(&c)));
}

/// What two AdamWs over tensors of these sizes do together.
fn adamws(sizes: [usize; 2], compute: Option<DType>) -> Program {
    let op = |weight_decay: f64| -> Op {
        let Op::AdamW(rest) = OpKind::AdamW.samples().remove(0).op else {
            unreachable!("a sample is of its op")
        };
        ir::ops::AdamW { weight_decay: weight_decay.into(), compute, ..rest }.into()
    };
    let ops = [op(0.1), op(0.0)];
    let scalar = || Operand { dtype: DType::F32, shape: SmallVec::new() };
    let tensor = |n| Operand { dtype: DType::F32, shape: SmallVec::from_slice(&[n]) };
    let operands = sizes.map(|n| {
        let args = [vec![tensor(n); 3], vec![scalar(), tensor(n)], vec![scalar(); 3]].concat();
        let copy = compute.map(|dtype| Operand { dtype, ..tensor(n) });
        let states = vec![tensor(n); 3].into_iter().chain([scalar()]);
        (args, states.chain(copy).collect::<Vec<_>>())
    });
    let calls: Vec<OpCall<'_>> = ops
        .iter()
        .zip(&operands)
        .map(|(op, (args, results))| OpCall { op, args, results, bounds: &[] })
        .collect();
    let res = lower(&calls).unwrap_or_else(|it| panic!("{it}"));
    check(&res, 14, operands.iter().map(|it| it.1.len()).sum());
    res
}

#[test]
fn one_launch_updates_many_tensors() {
    let program = adamws([32769, 5], Some(DType::Bf16));
    let [Work::Launch(launch), Work::Launch(count)] = program.work.as_slice() else {
        panic!("{program:?}")
    };
    assert_eq!((count.function.entry, count.grid), ("count", [1, 1, 1]));
    assert_eq!(launch.grid, [3, 1, 1], "two chunks and one");
    assert!(launch.function.defines.contains(&"COMPUTE=bf16".to_string()));
    let pointers = |args: [u32; 4], results: [u32; 4]| -> Vec<Word> {
        let (args, results) = (args.map(Pointer::Arg), results.map(Pointer::Result));
        args.into_iter().chain(results).map(Word::Pointer).collect()
    };
    let table = [
        pointers([0, 1, 2, 4], [0, 1, 2, 4]),
        [0, 32769, 0.1f64.to_bits(), 0].map(Word::Value).to_vec(),
        vec![Word::Pointer(Pointer::Arg(3)), Word::Pointer(Pointer::Result(3))],
        pointers([8, 9, 10, 12], [5, 6, 7, 9]),
        [0, 5, 0, 2].map(Word::Value).to_vec(),
        vec![Word::Pointer(Pointer::Arg(11)), Word::Pointer(Pointer::Result(8))],
        vec![Word::Pieces { of: 0, n: 2 }, Word::Pieces { of: 1, n: 1 }],
    ];
    assert_eq!(program.table, table.concat());
    assert_eq!(program.table_words(), 28 + 3);
}

#[test]
fn empty_tensors_are_not_updated() {
    let program = adamws([0, 5], None);
    let [Work::Launch(launch), Work::Launch(_)] = program.work.as_slice() else {
        panic!("{program:?}")
    };
    assert_eq!(launch.grid, [1, 1, 1]);
    let chunks = [Word::Pieces { of: 0, n: 0 }, Word::Pieces { of: 1, n: 1 }];
    assert_eq!(program.table[28..], chunks);
}

#[test]
fn the_sum_of_no_squares_is_written_too() {
    let program = lowered(&Sample::floats(ir::ops::SumSquares {}, &[&[0]]));
    let [Work::Launch(sum)] = program.work.as_slice() else { panic!("{program:?}") };
    assert_eq!((sum.function.entry, sum.grid), ("sum_squares", [1, 1, 1]));
}

fn attention(d: u64, dtype: DType, backward: bool) -> Program {
    let (q, kv, lse) = ([2, 100, 4 * d], [2, 100, 2 * d], [2, 100, 4]);
    let shapes: [&[u64]; 6] = [&q, &kv, &kv, &q, &lse, &q];
    let op = ir::ops::Attention { head_dim: d, causal: true, scale: None };
    let grad = ir::ops::AttentionGrad { head_dim: d, causal: true, scale: None };
    match backward {
        false => lowered(&in_dtype(Sample::floats(op, &shapes[..3]), dtype)),
        true => {
            let mut sample = in_dtype(Sample::floats(grad, &shapes), dtype);
            sample.inputs[4].ty.dtype = DType::F32;
            lowered(&sample)
        }
    }
}

#[test]
fn a_library_gets_its_scratch_where_it_takes_the_shape() {
    let program = attention(128, DType::Bf16, false);
    let [Work::Attention(it)] = program.work.as_slice() else { panic!("{program:?}") };
    assert_eq!((it.fallback.len(), it.scratch), (1, 0));
    assert_eq!(program.workspace, 1 << 20, "the plan's own");
    let program = attention(128, DType::Bf16, true);
    let [Work::Attention(it)] = program.work.as_slice() else { panic!("{program:?}") };
    assert_eq!((it.fallback.len(), it.args.len(), it.results.len()), (3, 6, 3));
    // f32 [2, 4, 100] rounded up to 256 bytes, f32 [2, 4, 100, 128], two of that in bf16.
    assert_eq!(program.workspace, 3328 + 409_600 + 2 * 204_800 + (1 << 20));
}

#[test]
fn attention_of_other_shapes_is_our_own() {
    for (d, dtype) in [(128, DType::F32), (80, DType::Bf16)] {
        let program = attention(d, dtype, true);
        let entries: Vec<&str> = program
            .work
            .iter()
            .map(|it| if let Work::Launch(it) = it { it.function.entry } else { "" })
            .collect();
        assert_eq!(entries, ["attention_delta", "attention_grad_q", "attention_grad_kv"]);
        assert_eq!(program.workspace, 3328, "f32 [2, 100, 4], rounded up to 256 bytes");
    }
}

/// Keys of queries that there are none of have gradients: zeros.
#[test]
fn keys_without_queries_get_gradients() {
    let shapes: [&[u64]; 6] =
        [&[1, 0, 8], &[1, 5, 8], &[1, 5, 8], &[1, 0, 8], &[1, 0, 1], &[1, 0, 8]];
    let op = ir::ops::AttentionGrad { head_dim: 8, causal: false, scale: None };
    let program = lowered(&Sample::floats(op, &shapes));
    let [Work::Launch(launch)] = program.work.as_slice() else { panic!("{program:?}") };
    assert_eq!(launch.function.entry, "attention_grad_kv");
}

#[test]
fn an_odd_table_is_gathered_by_element() {
    let unit = |d: u64, dtype: DType| {
        let sample = Sample::floats(ir::ops::Embedding::default(), &[&[6], &[9, d]]);
        let sample = in_dtype(sample.fill(0, ir::ops::Values::Ids(9)), dtype);
        let program = lowered(&sample);
        let [Work::Launch(launch)] = program.work.as_slice() else { panic!("{program:?}") };
        (launch.function.defines[0].clone(), launch.args[3])
    };
    assert_eq!(unit(8, DType::Bf16), ("UNIT=uint4".into(), Arg::I64(1)));
    assert_eq!(unit(9, DType::Bf16), ("UNIT=u16".into(), Arg::I64(9)));
    assert_eq!(unit(9, DType::F32), ("UNIT=u32".into(), Arg::I64(9)));
}

#[test]
fn gradients_of_a_table_are_zeroed_before_rows_are_added() {
    let op = ir::ops::EmbeddingGrad { vocab: 100, padding_idx: None, out: Some(DType::F32) };
    let sample = Sample::floats(op, &[&[6], &[6, 2056]]).fill(0, ir::ops::Values::Ids(9));
    let program = lowered(&in_dtype(sample, DType::Bf16));
    let zero = Work::Fill { to: Pointer::Result(0), bytes: 100 * 2056 * 4, value: 0 };
    assert_eq!(program.work[0], zero);
    assert_eq!(program.workspace, 1024, "8 bytes a row, rounded up to 256");
    let Work::Launch(sum) = &program.work[3] else { panic!("{program:?}") };
    assert_eq!(sum.grid, [6, 2, 1], "a block sums 2048 columns");
}

#[test]
fn a_heads_features_have_a_limit() {
    let sample = Sample::floats(
        ir::ops::Attention { head_dim: 288, causal: true, scale: None },
        &[&[1, 4, 288], &[1, 4, 288], &[1, 4, 288]],
    );
    let operands: Vec<Operand> = sample.inputs.iter().map(|it| operand(&it.ty)).collect();
    let results = [operands[0].clone(), operands[0].clone()];
    let call = OpCall { op: &sample.op, args: &operands, results: &results, bounds: &[] };
    let error = lower(&[call]).expect_err("no kernel has so many registers");
    assert!(error.to_string().contains("heads of 288 features"), "{error}");
}

/// A product of codes `a` and `b` with these scales.
fn product(a: &[u64], b: &[u64], scales: [&[u64]; 2], granules: [Granule; 2]) -> Sample {
    let [a_granule, b_granule] = granules;
    let op = QuantMatmul {
        out: DType::Bf16,
        accumulate: false,
        bias: false,
        fast: true,
        a: a_granule,
        b: b_granule,
    };
    let mut res = Sample::floats(op, &[a, b, scales[0], scales[1]]);
    res.inputs[0].ty.dtype = DType::E5M2;
    res.inputs[1].ty.dtype = DType::E4M3;
    res
}

#[test]
fn codes_are_multiplied_with_their_scales() {
    let tensor = || [Granule::default(), Granule::default()];
    let program = lowered(&product(&[2, 512, 64], &[48, 64], [&[], &[]], tensor()));
    let [Work::Gemm(gemm)] = program.work.as_slice() else { panic!("{program:?}") };
    assert_eq!((gemm.m, gemm.n, gemm.k), (1024, 48, 64));
    assert!(!gemm.a.transposed && gemm.b.transposed, "both contract their last dims");
    let scale = |operand| Scale { at: Pointer::Arg(operand), of: ScaleOf::Tensor };
    assert_eq!(gemm.scales, Some(Scales { a: scale(2), b: scale(3), fast: true }));
    // Rows of 24 bytes, 40 columns: cuBLASLt takes neither.
    for (a, b) in [([5, 24], [48, 24]), ([5, 64], [40, 64])] {
        let program = lowered(&product(&a, &b, [&[], &[]], tensor()));
        let [Work::Launch(launch)] = program.work.as_slice() else { panic!("{program:?}") };
        assert_eq!(launch.function.defines, ["A=e5m2", "B=e4m3", "OUT=bf16"]);
        assert_eq!(launch.args[12..], [a[1], a[1]].map(|it| Arg::I64(it as i64)));
    }
}

/// cuBLASLt takes a bias in bf16 next to codes, and none in f32: a kernel adds that, in place.
#[test]
fn a_bias_is_the_gemms_where_it_is_bf16() {
    let biased = |out, accumulate, k: u64, granules: [Granule; 2]| {
        let [a, b] = granules;
        let scales: [&[u64]; 2] = if a == Granule::Row { [&[4, 64], &[2, 4]] } else { [&[], &[]] };
        let op = QuantMatmul { out, accumulate, bias: true, fast: true, a, b };
        let added: &[&[u64]] = if accumulate { &[&[64, 256], &[256]] } else { &[&[256]] };
        let (x, w): (&[u64], &[u64]) = (&[64, k], &[256, k]);
        let shapes = [&[x, w, scales[0], scales[1]], added].concat();
        let mut res = Sample::floats(op, &shapes);
        res.inputs[..2].iter_mut().for_each(|it| it.ty.dtype = DType::E4M3);
        res.inputs[4..].iter_mut().for_each(|it| it.ty.dtype = out);
        lowered(&res)
    };
    let tensor = || [Granule::default(), Granule::default()];
    for granules in [tensor(), [Granule::Row, Granule::Block]] {
        for (accumulate, at) in [(false, 4), (true, 5)] {
            let program = biased(DType::Bf16, accumulate, 512, granules.clone());
            let [Work::Gemm(gemm)] = program.work.as_slice() else { panic!("{program:?}") };
            let c = accumulate.then_some(Pointer::Arg(4));
            assert_eq!((gemm.c, gemm.bias), (c, Some(Pointer::Arg(at))));
            let program = biased(DType::F32, accumulate, 512, granules.clone());
            let [Work::Gemm(gemm), Work::Launch(launch)] = program.work.as_slice() else {
                panic!("{program:?}")
            };
            assert_eq!((gemm.c, gemm.bias), (c, None));
            let (sum, bias) = (Pointer::Result(0), Pointer::Arg(at));
            assert_eq!(launch.args[..3], [sum, sum, bias].map(Arg::Pointer));
        }
    }
    // Our own kernel takes both: rows of 24 bytes.
    let program = biased(DType::F32, true, 24, tensor());
    let [Work::Launch(launch)] = program.work.as_slice() else { panic!("{program:?}") };
    assert_eq!(launch.args[5..7], [4, 5].map(|it| Arg::Pointer(Pointer::Arg(it))));
    // Nothing is contracted.
    let program = biased(DType::Bf16, false, 0, tensor());
    let [Work::Fill { .. }, Work::Launch(launch)] = program.work.as_slice() else {
        panic!("{program:?}")
    };
    assert_eq!(launch.args[2], Arg::Pointer(Pointer::Arg(4)));
}

/// Five blocks in a row are eight for cuBLASLt, whose workspace is in front.
#[test]
fn rows_of_blocks_are_as_long_as_the_library_wants() {
    let granules = || [Granule::Row, Granule::Block];
    let of = |k: u64, a_scale: &[u64], b_scale: &[u64]| {
        lowered(&product(&[64, k], &[256, k], [a_scale, b_scale], granules()))
    };
    let program = of(640, &[5, 64], &[2, 5]);
    let [Work::Launch(pad), Work::Gemm(gemm)] = program.work.as_slice() else {
        panic!("{program:?}")
    };
    let to = Pointer::Workspace(GEMM_WORKSPACE);
    assert_eq!(pad.args[..2], [to, Pointer::Arg(3)].map(Arg::Pointer));
    assert_eq!(pad.args[2..], [5, 0, 8, 16].map(Arg::U32));
    let scales = gemm.scales.expect("codes have scales");
    assert_eq!(scales.a, Scale { at: Pointer::Arg(2), of: ScaleOf::Row });
    assert_eq!(scales.b, Scale { at: to, of: ScaleOf::Block });
    assert!(!scales.fast, "there are no fast sums of blocks");
    assert_eq!(program.workspace, GEMM_WORKSPACE + 256);
    let program = of(512, &[4, 64], &[2, 4]);
    let [Work::Gemm(gemm)] = program.work.as_slice() else { panic!("{program:?}") };
    assert_eq!(gemm.scales.map(|it| it.b.at), Some(Pointer::Arg(3)));
}

#[track_caller]
fn check_refused(sample: &Sample, why: &str) {
    let args: Vec<Operand> = sample.inputs.iter().map(|it| operand(&it.ty)).collect();
    let types: Vec<&TensorType> = sample.inputs.iter().map(|it| &it.ty).collect();
    let results = sample.op.infer(&types).expect("a sample is well-typed");
    let results: Vec<Operand> = results.iter().map(operand).collect();
    let call = OpCall { op: &sample.op, args: &args, results: &results, bounds: &[] };
    let error = lower(&[call]).expect_err("no kernel is fast enough").to_string();
    assert!(error.contains(why), "{error}");
}

#[test]
fn large_products_that_the_library_does_not_take_are_refused() {
    let tensor = || [Granule::default(), Granule::default()];
    let odd = product(&[8192, 4100], &[4096, 4100], [&[], &[]], tensor());
    check_refused(&odd, "contracted size is 4100");
    let odd = product(&[8192, 4096], &[4100, 4096], [&[], &[]], tensor());
    check_refused(&odd, "4100");
    let pieces = [Granule::Tensor(vec![0]), Granule::default()];
    let many = product(&[8192, 4096], &[4096, 4096], [&[4], &[]], pieces);
    check_refused(&many, "operand 0 has 4 scales on this rank");
    let mut small = product(&[16, 16], &[16, 16], [&[], &[]], tensor());
    small.inputs[1].ty.dtype = DType::E5M2;
    check_refused(&small, "make one of them e4m3");
}

#[test]
fn codes_with_columns_are_made_of_squares() {
    let make = |copies, shape: &[u64]| {
        let op = Quantize::new(DType::E4M3, copies);
        lowered(&Sample::floats(op, &[shape, &[]]))
    };
    // 3 x 2 squares of [300, 200].
    let program = make(Copies::Both, &[3, 100, 200]);
    let [Work::Launch(launch)] = program.work.as_slice() else { panic!("{program:?}") };
    assert_eq!((launch.function.entry, launch.grid), ("quantize_squares", [6, 1, 1]));
    let pointers = [Pointer::Arg(0), Pointer::Arg(1), Pointer::Result(0), Pointer::Result(1)];
    assert_eq!(program.table[..4], pointers.map(Word::Pointer));
    assert_eq!(program.table[4..], [300, 200].map(Word::Value));
    let program = make(Copies::Columns, &[300, 200]);
    assert_eq!(program.table[2..4], [Word::Value(0), Word::Pointer(Pointer::Result(0))]);
    let program = make(Copies::Rows, &[300, 200]);
    let [Work::Launch(launch)] = program.work.as_slice() else { panic!("{program:?}") };
    assert_eq!((launch.function.entry, launch.grid), ("quantize_rows", [2, 1, 1]));
    assert_eq!(program.table[2..4], [Word::Pointer(Pointer::Result(0)), Word::Value(0)]);
}

/// Each row of squares leaves a row of sums, which a second launch adds up.
#[test]
fn codes_with_a_sum_are_made_of_squares() {
    let op = fused(
        "(f32, f32) { %2 = quantize(to:e5m2) %0, %1; %3 = sum_leading(out:Some(bf16)) %0; return %2, %3 }",
    );
    let program = lowered(&Sample::floats(op.clone(), &[&[3, 100, 200], &[]]));
    let [Work::Launch(codes), Work::Launch(sum)] = program.work.as_slice() else {
        panic!("{program:?}")
    };
    assert_eq!((codes.function.entry, codes.grid), ("quantize_squares", [6, 1, 1]));
    assert_eq!(program.table[2..4], [Word::Pointer(Pointer::Result(0)), Word::Value(0)]);
    let parts = Arg::Pointer(Pointer::Workspace(0));
    assert_eq!((codes.args[2], sum.args[1]), (parts, parts));
    assert_eq!(sum.args[0], Arg::Pointer(Pointer::Result(1)));
    // 3 rows of 200 sums of 4 bytes.
    assert_eq!((sum.args[2], program.workspace), (Arg::I64(3), 2560));
    let program = lowered(&Sample::floats(op, &[&[0, 8], &[]]));
    assert_eq!(program.work[..], [Work::Fill { to: Pointer::Result(1), bytes: 16, value: 0 }]);
}

/// Parts of 50 rows, in tiles of 128 columns, f32; all parts of a result, then those of the next.
#[test]
fn gradients_of_glus_sum_what_they_make_in_parts() {
    let op = fused(
        "(f32, f32, f32) { %3, %4 = glu_grad(kind:swiglu) %0, %1, %2; %5 = sum_leading %4; \
         %6 = sum_leading(out:Some(bf16)) %3; return %3, %4, %5, %6 }",
    );
    let shape: &[u64] = &[2, 100, 256];
    let program = lowered(&Sample::floats(op, &[shape; 3]));
    let [Work::Launch(glu), Work::Launch(gate), Work::Launch(up)] = program.work.as_slice() else {
        panic!("{program:?}")
    };
    assert_eq!((glu.function.entry, glu.grid), ("glu_grad", [2, 4, 1]));
    assert!(glu.function.defines.contains(&"SUM=3".to_string()), "{glu:?}");
    let to_from = |result, at| [Pointer::Result(result), Pointer::Workspace(at)].map(Arg::Pointer);
    // 4 parts of 256 columns of 4 bytes, of the gate first.
    assert_eq!(up.args[..2], to_from(2, 4096));
    assert_eq!(gate.args[..2], to_from(3, 0));
    assert_eq!((up.args[2], program.workspace), (Arg::I64(4), 8192));
}

/// Weights are quantized together, each with its own squares.
#[test]
fn one_launch_quantizes_many_tensors() {
    let op: Op = Quantize::new(DType::E4M3, Copies::Both).into();
    let operand = |dtype, shape: &[usize]| Operand { dtype, shape: SmallVec::from_slice(shape) };
    let operands = [[129, 5], [1, 128]].map(|shape| {
        let args = [operand(DType::Bf16, &shape), operand(DType::F32, &[])];
        let results = [shape, [shape[1], shape[0]]].map(|it| operand(DType::E4M3, &it));
        (args, results)
    });
    let calls =
        operands.each_ref().map(|(args, results)| OpCall { op: &op, args, results, bounds: &[] });
    let program = lower(&calls).unwrap_or_else(|it| panic!("{it}"));
    check(&program, 4, 4);
    let [Work::Launch(launch)] = program.work.as_slice() else { panic!("{program:?}") };
    assert_eq!(launch.grid, [3, 1, 1]);
    let pieces = [Word::Pieces { of: 0, n: 2 }, Word::Pieces { of: 1, n: 1 }];
    assert_eq!(program.table[12..], pieces);
}

/// A batch has one number of each tensor, so that each has a row of the table, and no parts of sums.
#[test]
fn tensors_with_several_scales_or_a_sum_are_not_batched() {
    let amax: Op = Amax { pieces: vec![(0, 2)] }.into();
    let quantize: Op =
        Quantize { pieces: vec![0], ..Quantize::new(DType::E4M3, Copies::Rows) }.into();
    for (n, batched) in [(1, true), (2, false)] {
        let operand = |dtype, n| Operand { dtype, shape: SmallVec::from_slice(&[n]) };
        let (x, scale) = (operand(DType::Bf16, 8), operand(DType::F32, n));
        let (args, codes) = ([x, scale.clone()], [operand(DType::E4M3, 8)]);
        let scale = [scale];
        let call = OpCall { op: &amax, args: &args[..1], results: &scale, bounds: &[] };
        assert_eq!(batchable(&call, &call), batched);
        let call = OpCall { op: &quantize, args: &args, results: &codes, bounds: &[] };
        assert_eq!(batchable(&call, &call), batched);
        let summed = fused(
            "(bf16, f32) { %2 = quantize(to:e4m3,pieces:[0]) %0, %1; %3 = sum_leading(out:Some(f32)) %0; \
             return %2, %3 }",
        );
        let [codes] = codes;
        let results = [codes, operand(DType::F32, 8)];
        let call = OpCall { op: &summed, args: &args, results: &results, bounds: &[] };
        assert!(!batchable(&call, &call));
    }
}

/// A weight and one that this rank has nothing of: results of both copies count, squares of the first.
#[test]
fn one_launch_quantizes_many_tensors_in_blocks() {
    let op = |copies| QuantizeBlock {
        to: DType::E4M3,
        from: DType::Bf16,
        square: true,
        pow2: false,
        copies,
        uneven: false,
    };
    let of = |copies, sizes: &[[u64; 2]]| {
        let op: Op = op(copies).into();
        let operands: Vec<_> = sizes
            .iter()
            .map(|shape| {
                let x = TensorType::new(DType::Bf16, shape);
                let results = op.infer(&[&x]).expect("whole blocks");
                ([operand(&x)], results.iter().map(operand).collect::<Vec<_>>())
            })
            .collect();
        let calls: Vec<OpCall<'_>> = operands
            .iter()
            .map(|(args, results)| OpCall { op: &op, args, results, bounds: &[] })
            .collect();
        let res = lower(&calls).unwrap_or_else(|it| panic!("{it}"));
        check(&res, calls.len(), operands.iter().map(|it| it.1.len()).sum());
        res
    };
    let program = of(Copies::Both, &[[256, 128], [0, 128], [128, 128]]);
    let [Work::Launch(launch)] = program.work.as_slice() else { panic!("{program:?}") };
    assert_eq!((launch.function.entry, launch.grid), ("quantize_blocks", [3, 1, 1]));
    let max = f32::from_bits(0x7f7f_0000);
    assert_eq!(launch.args[2..], [Arg::F32(448.0), Arg::F32(max), Arg::I32(0)]);
    let pointers = [8, 9, 10, 11].map(|it| Word::Pointer(Pointer::Result(it)));
    assert_eq!(program.table[19..23], pointers);
    let squares = [Word::Pieces { of: 0, n: 2 }, Word::Pieces { of: 2, n: 1 }];
    assert_eq!(program.table[27..], squares);
    let program = of(Copies::Columns, &[[256, 128]]);
    let pointers = [0, 1].map(|it| Word::Pointer(Pointer::Result(it)));
    assert_eq!(program.table[1..3], [0, 0].map(Word::Value));
    assert_eq!(program.table[3..5], pointers);
    assert_eq!(program.table.len(), 9, "squares of one tensor need no list");
}

/// Pieces along dims 0 and 1, on a rank that holds columns 64 to 128 of 256, from row 32 of 96 on.
#[test]
fn random_bits_are_those_of_global_rows() {
    let op: Op =
        RoundNvFp4 { along: Along::Columns, pieces: vec![0, 1], stochastic: Some(7) }.into();
    let x = TensorType::new(DType::Bf16, &[2, 32, 64]);
    let amax = TensorType::new(DType::F32, &[2, 2]);
    let seed = TensorType::new(DType::I32, &[]);
    let args = [&x, &amax, &seed].map(operand);
    let bounds = [(0, 2, 2), (32, 32, 96), (64, 64, 256)];
    let bounds = bounds.map(|(start, extent, size)| LocalBound { start, extent, size });
    let call = OpCall { op: &op, args: &args, results: &args[..1], bounds: &bounds };
    let program = lower(&[call]).unwrap_or_else(|it| panic!("{it}"));
    check(&program, 3, 1);
    let [Work::Launch(launch)] = program.work.as_slice() else { panic!("{program:?}") };
    // A thread for each 16 of 4096 elements.
    assert_eq!((launch.function.entry, launch.grid), ("round_columns", [1, 1, 1]));
    assert_eq!(
        launch.args[6..11],
        [
            Arg::I32(3),
            Arg::Pointer(Pointer::Arg(2)),
            Arg::I64(7),
            Arg::Pointer(Pointer::Table(12)),
            Arg::I32(2),
        ]
    );
    // Rows of 64; the first element is 64 of row 32; rows are 256 apart.
    assert_eq!(launch.args[11..], [64, 32 * 256 + 64, 256].map(Arg::I64));
    assert_eq!(program.table[12..], [2, 96 * 256, 32, 256].map(Word::Value));
}

#[test]
fn a_matrix_of_codes_is_transposed_in_squares() {
    let transposed = |dtype| {
        let mut sample = Sample::floats(ir::ops::Transpose { perm: vec![1, 0] }, &[&[300, 200]]);
        sample.inputs[0].ty.dtype = dtype;
        lowered(&sample)
    };
    let program = transposed(DType::E4M3);
    let [Work::Launch(launch)] = program.work.as_slice() else { panic!("{program:?}") };
    assert_eq!((launch.function.entry, launch.grid), ("transpose_bytes", [6, 1, 1]));
    assert_eq!(launch.args[2..], [300, 200].map(Arg::I64));
    let program = transposed(DType::Bf16);
    let [Work::Launch(launch)] = program.work.as_slice() else { panic!("{program:?}") };
    assert_eq!(launch.function.entry, "transpose_tiles");
}

#[test]
fn codes_are_sliced_at_any_byte() {
    let mut sample = Sample::floats(ir::ops::SliceDim { dim: 1, start: 3, len: 50 }, &[&[33, 67]]);
    sample.inputs[0].ty.dtype = DType::E4M3;
    let program = lowered(&sample);
    let [Work::Launch(launch)] = program.work.as_slice() else { panic!("{program:?}") };
    assert_eq!(launch.function.defines[0], "V=u8");
}
