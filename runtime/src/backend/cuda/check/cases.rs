//! What is checked: the samples of every op, and larger random cases where kernels take other paths.

mod codes;

use ir::ops::{
    Activation, ActivationGrad, ActivationKind, Adam, AdamW, Add, Amax, Amaxes, Attention,
    AttentionGrad, BiasAdd, Body, Cast, CeLoss, CeLossGrad, CeMax, CeStats, CeStatsGrad, Codes,
    Copies, CrossEntropy, Dropout, Embedding, EmbeddingGrad, Fused, Glu, GluGrad, GluKind,
    LayerNorm, LayerNormGrad, LocalBound, Matmul, Mul, Number, Op, OpKind, Quantize, RmsNorm,
    RmsNormGrad, Rope, Sample, SampleInput, Scale, Sgd, Source, SumLeading, SumSquares, Tensor,
    Transpose, Values, apply,
};
use ir::{DType, TensorType};
use kernels::cuda::runs;

/// Ops to run as one program.
#[derive(Debug, Clone)]
pub(super) struct Case {
    pub calls: Vec<Call>,
    /// How floats are stored, where nothing else is said.
    pub dtype: DType,
}

/// One op on operands, which are made when they are needed: all at once would take gigabytes.
#[derive(Debug, Clone)]
pub(super) struct Call {
    pub op: Op,
    inputs: Vec<SampleInput>,
    /// Of one rank; `None` where it holds everything.
    pub bounds: Option<Vec<LocalBound>>,
    /// Operand, dim and extent of what is followed by padding.
    padded: Option<(usize, usize, usize)>,
    /// Operands that hold something else than random numbers.
    contents: Vec<(usize, Content)>,
    /// For its gradient: the op whose results on the first operands are the next ones.
    forward: Option<Op>,
}

/// What an operand may hold instead.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Content {
    /// Numbers of all sizes, infinities, zeros, and what is no number.
    Wide,
    /// The same without signs.
    Magnitudes,
    /// One number.
    All(f64),
}

impl Content {
    fn put(self, tensor: &mut Tensor<f64>) {
        if let Content::All(it) = self {
            return tensor.data.fill(it);
        }
        for (i, it) in tensor.data.iter_mut().enumerate() {
            // Most are within a factor of 2^20; few are beyond the range of f32 or below its normal numbers.
            let far = i % 53 == 5;
            let exponent = if far { (i * 7 % 300) as i32 - 150 } else { (i * 11 % 41) as i32 - 20 };
            *it = match i % 997 {
                3 => f64::NAN,
                4 => 0.0,
                5 => -0.0,
                500 => f64::INFINITY,
                501 => f64::NEG_INFINITY,
                _ => *it * 2f64.powi(exponent),
            };
            if self == Content::Magnitudes {
                *it = it.abs();
            }
        }
    }
}

/// Larger than a block and than a vector of any kernel, and a multiple of neither.
const ROWS: u64 = 37;
/// Sizes of tensors of which a kernel does each element by itself.
const SIZES: [u64; 6] = [1, 3, 255, 1000, 65_537, 1_000_003];

/// All of them.
pub(super) fn cases() -> Vec<Case> {
    let kinds = OpKind::ALL.iter().filter(|it| is_local(**it));
    let samples = kinds.flat_map(|it| it.samples()).filter(|it| is_of_a_rank(&it.op));
    let samples = samples.flat_map(in_both);
    let larger = [
        elementwise(),
        summed(),
        norms(),
        rows(),
        rope(),
        cross_entropy(),
        embedding(),
        matmul(),
        attention(),
        optimizers(),
        codes::codes(),
    ];
    samples.chain(larger.into_iter().flatten()).collect()
}

/// Whether it is what a rank runs: one that holds several pieces takes amaxes by `amax`.
fn is_of_a_rank(op: &Op) -> bool {
    let number = |it: &Op| !matches!(it, Op::Amax(it) if it.pieces.iter().any(|it| it.1 != 1));
    op.amaxes().is_none_or(Amaxes::are_numbers)
        && (op.kind() != OpKind::Fused || op.parts().all(number) && runs(op))
}

/// Whether a device runs it alone: the others are done by communicators, or are gone before.
fn is_local(kind: OpKind) -> bool {
    ![OpKind::Collective, OpKind::Reshard].contains(&kind)
}

/// The sample in f32, and in bf16 where the op takes that.
fn in_both(sample: Sample) -> Vec<Case> {
    let mut narrow = sample.in_bf16();
    if let (Some(narrow), Some(trains)) = (&mut narrow, sample.op.trains()) {
        // Weights and their states stay in f32.
        narrow.inputs[..trains.grad()].clone_from_slice(&sample.inputs[..trains.grad()]);
    }
    let wide = one(call(&sample), DType::F32);
    std::iter::once(wide).chain(narrow.map(|it| one(call(&it), DType::Bf16))).collect()
}

fn one(call: Call, dtype: DType) -> Case {
    Case { calls: vec![call], dtype }
}

fn call(sample: &Sample) -> Call {
    let (op, inputs) = (sample.op.clone(), sample.inputs.clone());
    Call { op, inputs, bounds: None, padded: None, contents: Vec::new(), forward: None }
}

/// Random floats of these shapes, in both types, and positive scales of codes behind them.
fn floats(op: impl Into<Op>, shapes: &[&[u64]]) -> Vec<Case> {
    let op: Op = op.into();
    let mut shapes = shapes.to_vec();
    let scales = shapes.len()..shapes.len() + op.codes().map_or(0, |it| it.of.len());
    shapes.resize(scales.end, &[]);
    let sample = Sample::floats(op, &shapes);
    in_both(scales.fold(sample, |sample, it| sample.fill(it, Values::Positive)))
}

fn elementwise() -> Vec<Case> {
    let mut res = Vec::new();
    for n in SIZES {
        let one: &[u64] = &[n];
        res.extend(floats(Add {}, &[one, one]));
        res.extend(floats(Add {}, &[one, one, one, one]));
        res.extend(floats(Mul {}, &[one, one]));
        res.extend(floats(Scale { factor: 0.3.into() }, &[one]));
        res.extend(floats(Cast { to: DType::F32 }, &[one]));
        res.extend(floats(Cast { to: DType::Bf16 }, &[one]));
        let (grad, again) = gradients_of_glus();
        for way in WAYS {
            res.extend(fused(&[Glu::new(GluKind::Swiglu).into()], one, way, &[]));
        }
        let (e4m3, e5m2) = (DType::E4M3, DType::E5M2);
        for (core, of, made) in [
            (&grad[..], &[][..], &[][..]),
            (&again[..], &[], &[]),
            (&grad, &[0, 1], &[]),
            (&grad, &[1], &[]),
            (&again, &[2, 0, 1], &[]),
            (&grad, &[1, 0], &[(1, e5m2), (0, e5m2)]),
            (&grad, &[], &[(0, e4m3)]),
            (&again, &[0], &[(2, e4m3), (0, e5m2)]),
        ] {
            res.extend(fused(core, one, (of, made), &[]));
        }
        for kind in ActivationKind::ALL {
            for way in WAYS {
                res.extend(fused(&[Activation::new(kind).into()], one, way, &[]));
                res.extend(fused(&[ActivationGrad::new(kind).into()], one, way, &[]));
            }
        }
        res.extend(in_both(Sample::floats(SumSquares {}, &[one])));
    }
    res.extend(in_both(
        Sample::floats(Dropout { rate: 0.3.into(), key: 5 }, &[&[ROWS, 1001], &[]])
            .fill(1, Values::Ids(1 << 24)),
    ));
    // The same numbers on a rank that holds the middle of both dims.
    let shard = [(100, ROWS, 300), (33, 1001, 5000)];
    let bounds = shard.map(|(start, extent, size)| LocalBound { start, extent, size });
    let whole = res.len() - 2;
    for i in [whole, whole + 1] {
        let mut case = res[i].clone();
        case.calls[0].bounds = Some(bounds.to_vec());
        res.push(case);
    }
    res
}

/// Gradients that sum what they make, whose kernels take rows of whole vectors, or of none.
fn summed() -> Vec<Case> {
    let mut res = Vec::new();
    let shapes: [&[u64]; 5] = [&[1, 1], &[2, 37, 1001], &[1000, 517], &[3, 43, 264], &[ROWS, 4096]];
    let (grad, again) = gradients_of_glus();
    let e5m2 = &[(0, DType::E5M2), (1, DType::E5M2)][..];
    for (shape, dtype) in
        shapes.into_iter().flat_map(|it| [DType::F32, DType::Bf16].map(|dtype| (it, dtype)))
    {
        let sums: &[(usize, DType)] = &[(1, dtype), (0, dtype)];
        for way in WAYS {
            let op = ActivationGrad::new(ActivationKind::Gelu).into();
            res.extend(fused(&[op], shape, way, &sums[1..]));
        }
        for (core, of, made, sums) in [
            (&grad[..], &[][..], &[][..], &sums[..1]),
            (&grad, &[1, 0], e5m2, sums),
            (&again, &[0], &e5m2[..1], &sums[1..]),
            (&again, &[0, 1], e5m2, sums),
        ] {
            res.extend(fused(core, shape, (of, made), sums));
        }
    }
    res
}

/// The gradient of a glu, and both.
fn gradients_of_glus() -> ([Op; 1], [Op; 2]) {
    let (glu, grad) = (Glu::new(GluKind::Swiglu), GluGrad::new(GluKind::Swiglu));
    ([grad.clone().into()], [grad.into(), glu.into()])
}

/// Ops on operands of one shape, of which the second reads the last operands of the first; and the amaxes of these
/// results, their codes, and their sums in these types. In both types.
fn fused(core: &[Op], shape: &[u64], (of, made): Way<'_>, sums: &[(usize, DType)]) -> Vec<Case> {
    let n_args = |op: &Op| match op {
        Op::Activation(_) => 1,
        Op::GluGrad(_) => 3,
        _ => 2,
    };
    let n_results = |op: &Op| if let Op::GluGrad(_) = op { 2 } else { 1 };
    let case = |dtype: DType| {
        let n = n_args(&core[0]);
        let ty = TensorType::new(dtype, shape);
        let mut types = vec![&ty; n];
        let scale = TensorType::scalar(DType::F32);
        let dtypes = types.iter().map(|it| it.dtype);
        let mut body = Body::of(&core[0], dtypes, n_results(&core[0]))?;
        for op in &core[1..] {
            let last: Vec<Source> = (n - n_args(op)..n).map(Source::Operand).collect();
            body = body.then(op, &last, n_results(op))?;
        }
        let wide = made.iter().chain(sums);
        for &(of, _) in wide {
            body = body.widened(of, &types).ok()??;
        }
        let mut order: Vec<usize> = (0..body.results().len()).collect();
        for &(of, to) in made {
            order[of] = body.results().len();
            let quantize = Quantize::new(to, Copies::Rows).into();
            body = body.then(&quantize, &[Source::Result(of), Source::New(DType::F32)], 1)?;
            types.push(&scale);
        }
        for &(of, to) in sums {
            order.push(body.results().len());
            let sum = SumLeading { out: Some(to) }.into();
            body = body.then(&sum, &[Source::Result(of)], 1)?;
            // What is summed is what is computed, which is then stored in its own type.
            if order[of] == of && dtype != DType::F32 {
                order[of] = body.results().len();
                body = body.then(&Cast { to: dtype }.into(), &[Source::Result(of)], 1)?;
            }
        }
        for &of in of {
            let coded = made.iter().any(|it| it.0 == of);
            let read = Source::Result(if coded { of } else { order[of] });
            order.push(body.results().len());
            body = body.then(&Amax::default().into(), &[read], 1)?;
        }
        let body = body.returning(&order)?;
        let op = body.alone().cloned().unwrap_or_else(|| Fused { body }.into());
        let shapes: Vec<&[u64]> = types.iter().map(|it| it.shape.as_slice()).collect();
        let mut sample = Sample::floats(op, &shapes);
        sample.inputs[..n].iter_mut().for_each(|it| it.ty.dtype = dtype);
        let sample = (n..shapes.len()).fold(sample, |it, scale| it.fill(scale, Values::Positive));
        Some(one(call(&sample), dtype))
    };
    [DType::F32, DType::Bf16].into_iter().map(|it| case(it).expect("it is a body")).collect()
}

/// Amaxes of these results.
fn amaxes(of: &[usize]) -> Amaxes {
    Amaxes { of: of.to_vec(), pieces: Vec::new() }
}

/// These results as codes.
fn codes(of: &[(usize, DType)]) -> Codes {
    Codes { of: of.into() }
}

/// Results of which there are amaxes, and those that are codes.
type Way<'a> = (&'a [usize], &'a [(usize, DType)]);

/// Amaxes and codes that the kernels of a first result give with it or as it.
const WAYS: [Way<'static>; 4] =
    [(&[], &[]), (&[0], &[]), (&[], &[(0, DType::E5M2)]), (&[0], &[(0, DType::E4M3)])];

fn norms() -> Vec<Case> {
    let mut res = Vec::new();
    for d in [7, 1000, 4096, 4100, 16_384] {
        let (x, w, per_row): (&[u64], &[u64], &[u64]) = (&[ROWS, d], &[d], &[ROWS]);
        for (residual, (of, made)) in
            [false, true].into_iter().flat_map(|it| WAYS.map(|way| (it, way)))
        {
            let (eps, n) = (1e-5.into(), usize::from(residual));
            let (amax, codes) = (amaxes(of), codes(made));
            let rms = RmsNorm { eps, residual, amax, codes, ..RmsNorm::default() };
            let (amax, codes) = (rms.amax.clone(), rms.codes.clone());
            let layer = LayerNorm { eps, residual, amax, codes, ..LayerNorm::default() };
            let coded = !rms.codes.is_none();
            // Numbers of which some are held to the largest code.
            for scale in [None, Some(300.0)].into_iter().take(1 + usize::from(coded)) {
                let scaled = |it: Vec<Case>| it.into_iter().map(move |it| it.scaled(scale));
                res.extend(scaled(floats(rms.clone(), &[x, w, x][..2 + n])));
                res.extend(scaled(floats(layer.clone(), &[x, w, w, x][..3 + n])));
            }
            if coded {
                continue;
            }
            let amax = rms.amax;
            for out in [None, Some(DType::F32)] {
                let rms =
                    RmsNormGrad { out, residual, amax: amax.clone(), ..RmsNormGrad::default() };
                let sample = Sample::floats(rms, &[x, x, w, per_row, x][..4 + n]);
                res.extend(in_both(sample.fill(3, Values::Positive)));
                let layer =
                    LayerNormGrad { out, residual, amax: amax.clone(), ..LayerNormGrad::default() };
                let sample = Sample::floats(layer, &[x, x, w, per_row, per_row, x][..5 + n]);
                res.extend(in_both(sample.fill(4, Values::Positive)));
            }
        }
    }
    res
}

/// Sums over rows, and what reads rows in another order.
fn rows() -> Vec<Case> {
    let x: &[u64] = &[1000, 517];
    let mut res = floats(BiasAdd {}, &[x, &[517]]);
    res.extend(floats(SumLeading::default(), &[x]));
    res.extend(floats(SumLeading { out: Some(DType::F32) }, &[x]));
    for sample in OpKind::Transpose.samples() {
        // As in the sample, on sizes that tiles do not divide.
        if let (Op::Transpose(Transpose { .. }), [input]) = (&sample.op, &sample.inputs[..]) {
            let sizes = [33, 129, 67, 5];
            let shape = &sizes[..input.ty.ndim()];
            res.extend(floats(sample.op.clone(), &[shape]));
        }
    }
    res
}

fn rope() -> Vec<Case> {
    let op = Rope {
        head_dim: 128,
        theta: 500_000.0.into(),
        interleaved: false,
        scaling: None,
        inverse: false,
    };
    let mut res = Vec::new();
    for interleaved in [false, true] {
        for inverse in [false, true] {
            let op = Rope { interleaved, inverse, ..op.clone() };
            let whole = floats(op, &[&[2, 131, 5 * 128]]);
            // A rank that holds the last rows, and a row of padding.
            for case in &whole {
                let mut shard = case.clone();
                shard.calls[0].bounds =
                    Some(vec![LocalBound { start: 70, extent: 130, size: 200 }]);
                shard.calls[0].padded = Some((0, 1, 130));
                res.push(shard);
            }
            res.extend(whole);
        }
    }
    res
}

fn cross_entropy() -> Vec<Case> {
    let mut res = Vec::new();
    for v in [1003, 32_000] {
        let (x, rows): (&[u64], &[u64]) = (&[ROWS, v], &[ROWS]);
        // A rank that holds a middle part, of which the last three columns are padding.
        let bound = LocalBound { start: v, extent: v - 3, size: 3 * v };
        for bound in [None, Some(bound)] {
            let ids = Values::Ids(bound.map_or(v, |it| it.size) as u32);
            let mut samples = vec![Sample::floats(CeMax {}, &[x])];
            for label_smoothing in [0.0, 0.1] {
                let label_smoothing = label_smoothing.into();
                let stats = Sample::floats(CeStats { label_smoothing }, &[x, rows, rows]);
                samples.push(stats.fill(1, ids));
                let grad =
                    Sample::floats(CeStatsGrad { label_smoothing }, &[x, rows, rows, rows, rows]);
                samples.push(grad.fill(1, ids));
            }
            for case in samples.into_iter().flat_map(in_both) {
                res.push(case.bounded(0, 1, bound));
            }
        }
    }
    // Rows without a vector, that shared memory keeps whole (one with all that needs no asking), or in part.
    for v in [3, 1003, 24_576, 32_000, 128_259] {
        for (ignore_index, eps) in [(-100, 0.0), (1, 0.1)] {
            let op = CrossEntropy { ignore_index, label_smoothing: eps.into() };
            let sample = Sample::floats(op, &[&[ROWS, v], &[ROWS]]);
            // Few labels, so that one of them is that which does not count.
            res.extend(in_both(sample.fill(1, Values::Ids(v.min(7) as u32))));
        }
    }
    for ignore_index in [-100, 1] {
        let n: &[u64] = &[3001];
        let loss = Sample::floats(CeLoss { ignore_index }, &[n; 4]);
        res.extend(in_both(loss.fill(1, Values::Positive).fill(3, Values::Ids(3))));
        let grad = Sample::floats(CeLossGrad { ignore_index }, &[n, n, &[]]);
        res.extend(in_both(grad.fill(0, Values::Positive).fill(1, Values::Ids(3))));
    }
    res
}

fn embedding() -> Vec<Case> {
    let mut res = Vec::new();
    let (n, d, v) = (3000, 260, 503);
    for bound in [None, Some(LocalBound { start: 200, extent: v - 3, size: 2000 })] {
        let ids = Values::Ids(bound.map_or(v, |it| it.size) as u32);
        for padding_idx in [None, Some(300)] {
            let sample = Sample::floats(Embedding { padding_idx }, &[&[n], &[v, d]]).fill(0, ids);
            res.extend(in_both(sample).into_iter().map(|it| it.bounded(1, 0, bound)));
            for out in [None, Some(DType::F32)] {
                let op = EmbeddingGrad { vocab: v, padding_idx, out };
                let sample = Sample::floats(op, &[&[n], &[n, d]]).fill(0, ids);
                for mut case in in_both(sample) {
                    // The bound is of the result, so that no operand has padding.
                    case.calls[0].bounds = bound.map(|it| vec![it]);
                    res.push(case);
                }
            }
        }
    }
    res
}

fn matmul() -> Vec<Case> {
    let mut res = Vec::new();
    let sizes = [(1, 5, 3), (1, 8, 16), (129, 257, 191), (64, 1000, 520), (300, 16, 1000)];
    for (m, n, k) in sizes {
        for (transpose_a, transpose_b) in [(false, false), (false, true), (true, false)] {
            let a: &[u64] = if transpose_a { &[k, m] } else { &[m, k] };
            let b: &[u64] = if transpose_b { &[n, k] } else { &[k, n] };
            let (c, row): (&[u64], &[u64]) = (&[m, n], &[n]);
            let op = Matmul { transpose_a, transpose_b, ..Matmul::default() };
            res.extend(floats(op.clone(), &[a, b]));
            res.extend(floats(Matmul { accumulate: true, ..op.clone() }, &[a, b, c]));
            if !transpose_a {
                res.extend(floats(Matmul { bias: true, ..op.clone() }, &[a, b, row]));
                let both = Matmul { bias: true, accumulate: true, ..op.clone() };
                res.extend(floats(both, &[a, b, c, row]));
                let mlp = Matmul { bias: true, gelu: true, ..op.clone() };
                res.extend(floats(mlp, &[a, b, row]));
            }
            res.extend(floats(Matmul { gelu: true, ..op.clone() }, &[a, b]));
            // Gradients of weights: bf16 operands, summed up in f32.
            for accumulate in [false, true] {
                let op = Matmul { accumulate, out: Some(DType::F32), ..op.clone() };
                let shapes = [a, b, c];
                let mut wide = Sample::floats(op, &shapes[..2 + usize::from(accumulate)]);
                wide.inputs[..2].iter_mut().for_each(|it| it.ty.dtype = DType::Bf16);
                res.push(one(call(&wide), DType::Bf16));
            }
        }
    }
    res
}

fn attention() -> Vec<Case> {
    let mut res = Vec::new();
    // Features, sequences, queries, keys, heads, key-value heads.
    let sizes = [
        (64, 2, 128, 128, 4, 4),
        (64, 1, 77, 133, 8, 2),
        (128, 1, 200, 200, 8, 2),
        (128, 2, 65, 65, 4, 1),
        (96, 1, 130, 130, 3, 3),
    ];
    for (head_dim, batch, s, t, heads, kv_heads) in sizes {
        let (q, kv) = ([batch, s, heads * head_dim], [batch, t, kv_heads * head_dim]);
        for causal in [false, true] {
            if causal && s != t {
                continue;
            }
            let op = Attention { head_dim, causal, scale: None };
            let forward = floats(op, &[&q, &kv, &kv]);
            res.extend(forward.iter().map(|it| it.attention_grad(causal, head_dim)));
            res.extend(forward);
        }
    }
    res
}

fn optimizers() -> Vec<Case> {
    let mut res = Vec::new();
    let (beta1, beta2, eps) = (0.9.into(), 0.95.into(), 1e-8.into());
    // The last of three scalars says whether the update is applied.
    let scalars = |sample: Sample, applied: Values| {
        let n = sample.inputs.len();
        let sample = (n - 3..n - 1).fold(sample, |it, i| it.fill(i, Values::Positive));
        sample.fill(n - 1, applied)
    };
    let adam = |op: Op, n: u64, applied: Values| {
        let x: &[u64] = &[n];
        let sample = Sample::floats(op, &[x, x, x, &[], x, &[], &[], &[]]);
        scalars(sample.fill(2, Values::Positive).fill(3, Values::Positive), applied)
    };
    let sgd = |momentum: f64, n: u64, applied: Values| {
        let x: &[u64] = &[n];
        let op = Sgd { momentum: momentum.into(), weight_decay: 0.1.into() };
        let states = if momentum == 0.0 { 2 } else { 3 };
        let shapes = [vec![x; states], vec![&[]; 3]].concat();
        scalars(Sample::floats(op, &shapes), applied)
    };
    let sizes = [1u64, 7, 4096, 1_000_003, 8192, 12_289];
    let batch = |make: &dyn Fn(u64) -> Sample| {
        // As many cases as a single one gives, each with that of every size.
        let all: Vec<Vec<Case>> = sizes.iter().map(|&n| in_both(make(n))).collect();
        let of = |i: usize| Case {
            calls: all.iter().map(|it| it[i].calls[0].clone()).collect(),
            dtype: all[0][i].dtype,
        };
        (0..all[0].len()).map(of).collect::<Vec<Case>>()
    };
    let all = [(None, &[][..]), (Some(DType::Bf16), &[]), (None, &[0]), (Some(DType::Bf16), &[0])];
    for (compute, of) in all {
        let amax = amaxes(of);
        // Each tensor may have a decay of its own.
        let decay = |n: u64| Number(if n.is_multiple_of(2) { 0.1 } else { 0.0 });
        for applied in [Values::One, Values::Zero] {
            res.extend(batch(&|n| {
                let (weight_decay, amax) = (decay(n), amax.clone());
                let op = AdamW { beta1, beta2, eps, weight_decay, compute, amax };
                adam(op.into(), n, applied)
            }));
            res.extend(batch(&|n| {
                let (weight_decay, amax) = (decay(n), amax.clone());
                let op = Adam { beta1, beta2, eps, weight_decay, compute, amax };
                adam(op.into(), n, applied)
            }));
        }
    }
    for applied in [Values::One, Values::Zero] {
        res.extend(batch(&|n| sgd(0.0, n, applied)));
        res.extend(batch(&|n| sgd(0.9, n, applied)));
    }
    res.extend(batch(&|n| Sample::floats(SumSquares {}, &[&[n]])));
    res
}

impl Case {
    /// The case on a rank that holds `bound` of dim `dim` of an operand.
    fn bounded(mut self, operand: usize, dim: usize, bound: Option<LocalBound>) -> Case {
        if let Some(bound) = bound {
            self.calls[0].bounds = Some(vec![bound]);
            self.calls[0].padded = Some((operand, dim, bound.extent as usize));
        }
        self
    }

    /// The case with something else in an operand.
    fn holding(mut self, operand: usize, content: Content) -> Case {
        self.calls[0].contents.push((operand, content));
        self
    }

    /// The case with another scale in its last operand, if there is one.
    fn scaled(self, scale: Option<f64>) -> Case {
        let last = self.calls[0].inputs.len() - 1;
        scale.into_iter().fold(self, |case, it| case.holding(last, Content::All(it)))
    }

    /// The gradient of an attention, with the results that it has.
    fn attention_grad(&self, causal: bool, head_dim: u64) -> Case {
        let mut call = self.calls[0].clone();
        let types: Vec<&TensorType> = call.types().collect();
        let made = call.op.infer(&types).expect("cases are well-typed");
        let dy = made[0].clone();
        let results = made.into_iter().chain([dy]);
        let inputs: Vec<SampleInput> =
            results.map(|ty| SampleInput { ty, values: Values::Random }).collect();
        call.inputs.extend(inputs);
        call.forward = Some(call.op);
        call.op = AttentionGrad { head_dim, causal, scale: None }.into();
        one(call, self.dtype)
    }
}

impl Call {
    /// Whether operands are random numbers, all of them finite.
    #[cfg(test)]
    pub fn is_random(&self) -> bool {
        self.contents.is_empty()
    }

    /// Types of the operands.
    pub fn types(&self) -> impl Iterator<Item = &TensorType> {
        self.inputs.iter().map(|it| &it.ty)
    }

    /// The operands, not yet rounded.
    pub fn operands(&self) -> Vec<Tensor<f64>> {
        let tensors = self.inputs.iter().enumerate();
        let mut res: Vec<Tensor<f64>> = tensors.map(|(i, it)| it.tensor(i as u64)).collect();
        for &(operand, content) in &self.contents {
            content.put(&mut res[operand]);
        }
        if let Some((operand, dim, extent)) = self.padded {
            zero_beyond(&mut res[operand], dim, extent);
        }
        if let Some(forward) = &self.forward {
            const N: usize = 3;
            let types: Vec<&TensorType> = self.types().take(N).collect();
            let made = apply(forward, &res[..N], &types).expect("cases are well-typed");
            let n = made.len();
            res.splice(N..N + n, made);
        }
        res
    }
}

/// Zeroes what is beyond `extent` in `dim`.
fn zero_beyond(tensor: &mut Tensor<f64>, dim: usize, extent: usize) {
    let size = tensor.shape[dim];
    let inner: usize = tensor.shape[dim + 1..].iter().product();
    for (i, value) in tensor.data.iter_mut().enumerate() {
        if i / inner % size >= extent {
            *value = 0.0;
        }
    }
}
