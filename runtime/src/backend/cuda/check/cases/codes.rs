//! FP8: scales, codes, their products, and what moves bytes.

use ir::DType;
use ir::ops::{
    Along, Amax, Body, Concat, Copies, DelayedScale, DelayedUpdate, Fill, Fused, Granule, Hadamard,
    LocalBound, Op, PadDim, QuantMatmul, QuantScale, Quantize, QuantizeBlock, RoundMx, RoundNvFp4,
    Sample, SliceDim, Source, SumLeading, Transpose, Values,
};
use ir::quant::AmaxAlgo;

use super::{Case, Content, SIZES, call, in_both, one};

const FORMATS: [DType; 2] = [DType::E4M3, DType::E5M2];

/// What operands hold: random numbers, some of all sizes, nothing but one number.
const CONTENTS: [Option<Content>; 6] = [
    None,
    Some(Content::Wide),
    Some(Content::All(0.0)),
    Some(Content::All(1e-39)),
    Some(Content::All(-3e38)),
    Some(Content::All(f64::NAN)),
];

pub(super) fn codes() -> Vec<Case> {
    [
        amax(),
        scales(),
        updates(),
        quantize(),
        quantize_block(),
        round_mx(),
        round_nvfp4(),
        hadamard(),
        moves(),
        matmul(),
        matmul_in_blocks(),
    ]
    .into_iter()
    .flatten()
    .collect()
}

/// One program for as many of these cases, which are in f32 and bf16 in turns, as there are of a type.
fn batches(cases: &[Case]) -> Vec<Case> {
    let of = |dtype: DType| {
        let calls: Vec<_> =
            cases.iter().filter(|it| it.dtype == dtype).flat_map(|it| it.calls.clone()).collect();
        Case { calls, dtype }
    };
    [DType::F32, DType::Bf16].map(of).into_iter().filter(|it| it.calls.len() > 1).collect()
}

fn amax() -> Vec<Case> {
    let mut res: Vec<Case> = SIZES
        .iter()
        .flat_map(|&n| in_both(Sample::floats(Amax::default(), &[&[n]])))
        .map(|it| it.holding(0, Content::Wide))
        .collect();
    res.extend(batches(&res));
    for content in [Content::All(f64::NAN), Content::All(0.0)] {
        let nothing = in_both(Sample::floats(Amax::default(), &[&[3, 1000]]));
        res.extend(nothing.into_iter().map(|it| it.holding(0, content)));
    }
    let pieces = Amax { pieces: vec![(0, 4), (2, 2)] };
    let pieces = in_both(Sample::floats(pieces, &[&[36, 5, 22]]));
    res.extend(pieces.into_iter().map(|it| it.holding(0, Content::Wide)));
    res
}

fn scales() -> Vec<Case> {
    let mut res = Vec::new();
    for to in FORMATS {
        for (pow2, epsilon) in [(false, 0.0), (true, 1e-12)] {
            let op = QuantScale { to, pow2, epsilon: epsilon.into() };
            let some: Vec<Case> = [1, 7, 1001]
                .into_iter()
                .flat_map(|n| in_both(Sample::floats(op.clone(), &[&[n]])))
                .map(|it| it.holding(0, Content::Magnitudes))
                .collect();
            res.extend(batches(&some));
            res.extend(some);
        }
    }
    let states: Vec<Case> = [0.0, 3.0, 1e-39, 2e38]
        .into_iter()
        .flat_map(|it| scalar_cases(DelayedScale {}, &[&[]], &[(0, it)]))
        .collect();
    res.extend(batches(&states));
    res.extend(states);
    res
}

/// Positive operands of these shapes, of which some are one number.
fn scalar_cases(op: impl Into<Op>, shapes: &[&[u64]], numbers: &[(usize, f64)]) -> Vec<Case> {
    let sample = (0..shapes.len())
        .fold(Sample::floats(op, shapes), |sample, it| sample.fill(it, Values::Positive));
    let holding = |case: Case| {
        numbers.iter().fold(case, |case, &(operand, it)| case.holding(operand, Content::All(it)))
    };
    in_both(sample).into_iter().map(holding).collect()
}

fn updates() -> Vec<Case> {
    let mut res = Vec::new();
    for to in FORMATS {
        for (algo, margin) in [(AmaxAlgo::Max, 0), (AmaxAlgo::MostRecent, -1), (AmaxAlgo::Max, 3)] {
            let op = DelayedUpdate { to, margin, algo };
            let mut some = Vec::new();
            for n in [1, 4, 32, 33, 1024] {
                let make =
                    |numbers: &[(usize, f64)]| scalar_cases(op.clone(), &[&[n], &[], &[]], numbers);
                some.extend(make(&[]));
                // The free slot counts for an amax of 0, and nothing if it is 0 too.
                some.extend(make(&[(1, 0.0)]));
                some.extend(make(&[(1, 0.0), (0, 0.0)]));
                some.extend(make(&[(1, 0.0), (0, 0.0), (2, 0.0)]));
                some.extend(make(&[(1, f64::INFINITY)]));
                some.extend(make(&[(1, f64::NAN), (2, 0.0)]));
                some.extend(make(&[(0, 0.0), (1, 1e-40)]));
            }
            res.extend(batches(&some));
            res.extend(some);
        }
    }
    res
}

fn quantize() -> Vec<Case> {
    let shapes: [&[u64]; 6] =
        [&[1, 1], &[37, 1001], &[130, 264], &[3, 257, 96], &[256, 384], &[65_537]];
    let mut res = Vec::new();
    for to in FORMATS {
        for copies in [Copies::Rows, Copies::Columns, Copies::Both] {
            let op = |pieces: &[usize]| {
                Op::from(Quantize { pieces: pieces.to_vec(), ..Quantize::new(to, copies) })
            };
            let plain = |shape: &[u64], scale: &[u64], pieces: &[usize]| {
                in_both(Sample::floats(op(pieces), &[shape, scale]).fill(1, Values::Positive))
            };
            let summed = |shape: &[u64], scale: &[u64], pieces: &[usize], sum: DType| {
                [DType::F32, DType::Bf16].map(|dtype| {
                    let n = if copies == Copies::Both { 2 } else { 1 };
                    let body = Body::of(&op(pieces), [dtype, DType::F32], n).expect("a body");
                    let sum = SumLeading { out: Some(sum) }.into();
                    let body = body.then(&sum, &[Source::Operand(0)], 1).expect("a body");
                    let mut sample = Sample::floats(Fused { body }, &[shape, scale]);
                    sample.inputs[0].ty.dtype = dtype;
                    one(call(&sample.fill(1, Values::Positive)), dtype)
                })
            };
            let make = |shape: &[u64], scale: &[u64], pieces: &[usize]| {
                let some = plain(shape, scale, pieces);
                some.into_iter().map(|it| it.holding(0, Content::Wide))
            };
            for sum in [DType::F32, DType::Bf16] {
                res.extend(shapes.iter().flat_map(|it| summed(it, &[], &[], sum)));
                // More rows of squares than one block adds up; several scales.
                res.extend(summed(&[70_001, 40], &[], &[], sum));
                res.extend(summed(&[36, 5, 22], &[4, 2], &[0, 2], sum));
            }
            let some: Vec<Case> = shapes.iter().flat_map(|it| make(it, &[], &[])).collect();
            res.extend(batches(&some));
            res.extend(some);
            res.extend(make(&[36, 5, 22], &[4, 2], &[0, 2]));
        }
    }
    res
}

/// Rows that are no multiple of a square where rows are cut, columns where columns are; several of both.
fn quantize_block() -> Vec<Case> {
    let both: &[&[u64]] = &[&[128, 128], &[2, 256, 384]];
    let rows: &[&[u64]] = &[&[1, 128], &[3, 37, 256], &[1001, 640]];
    let columns: &[&[u64]] = &[&[128, 1], &[2, 128, 37], &[256, 264], &[384, 1000]];
    let ways = [
        (false, Copies::Rows, rows),
        (false, Copies::Columns, columns),
        (false, Copies::Both, both),
        (true, Copies::Rows, both),
        (true, Copies::Columns, both),
        (true, Copies::Both, both),
    ];
    let mut res = Vec::new();
    for (to, from) in
        FORMATS.into_iter().flat_map(|it| [DType::F32, DType::Bf16].map(|of| (it, of)))
    {
        for ((square, copies, shapes), pow2) in
            ways.into_iter().flat_map(|it| [(it, false), (it, true)])
        {
            let op = QuantizeBlock { to, from, square, pow2, copies, uneven: false };
            let make = |shape: &[u64], content: Option<Content>| {
                let mut sample = Sample::floats(op.clone(), &[shape]);
                sample.inputs[0].ty.dtype = from;
                let case = one(call(&sample), from);
                content.into_iter().fold(case, |case, it| case.holding(0, it))
            };
            let some: Vec<Case> = [both, shapes]
                .concat()
                .into_iter()
                .map(|it| make(it, Some(Content::Wide)))
                .collect();
            res.extend(batches(&some));
            res.extend(some);
            res.extend(CONTENTS.into_iter().map(|it| make(shapes[1], it)));
        }
        // Ranks that hold fewer rows, or fewer columns, than their buffers have room for.
        let op = QuantizeBlock {
            to,
            from,
            square: true,
            pow2: true,
            copies: Copies::Rows,
            uneven: true,
        };
        for extents in [[384, 640], [128, 640], [384, 256], [0, 640]] {
            let mut sample = Sample::floats(op.clone(), &[&[384, 640]]);
            sample.inputs[0].ty.dtype = from;
            let mut case = one(call(&sample), from);
            let bound = |extent| LocalBound { start: 384, extent, size: 1280 };
            case.calls[0].bounds = Some(extents.map(bound).to_vec());
            res.push(case);
        }
    }
    res
}

/// How blocks may lie, with shapes of which dims that are not cut are odd.
const ALONG: [(Along, [&[u64]; 3]); 3] = [
    (Along::Rows, [&[1, 32], &[3, 37, 96], &[1001, 640]]),
    (Along::Columns, [&[32, 1], &[3, 96, 37], &[640, 1001]]),
    (Along::Square, [&[32, 32], &[3, 96, 160], &[640, 1024]]),
];

/// The sample in both types, with each of these in the first operand.
fn holding_each(sample: &Sample) -> Vec<Case> {
    let case = |(content, case): (Option<Content>, Case)| {
        content.into_iter().fold(case, |case, it| case.holding(0, it))
    };
    CONTENTS
        .into_iter()
        .flat_map(|it| in_both(sample.clone()).into_iter().map(move |case| (it, case)))
        .map(case)
        .collect()
}

fn round_mx() -> Vec<Case> {
    let mut res = Vec::new();
    for to in FORMATS {
        for (along, shapes) in ALONG {
            for shape in shapes {
                res.extend(holding_each(&Sample::floats(RoundMx { to, along }, &[shape])));
            }
        }
    }
    res
}

fn round_nvfp4() -> Vec<Case> {
    let mut res = Vec::new();
    for stochastic in [None, Some(5)] {
        for (along, shapes) in ALONG {
            let make = |shape: &[u64], amax: &[u64], pieces: &[usize]| {
                let op = RoundNvFp4 { along, pieces: pieces.to_vec(), stochastic };
                let n = 2 + usize::from(stochastic.is_some());
                let sample = Sample::floats(op, &[shape, amax, &[]][..n]);
                let sample = sample.fill(1, Values::Positive);
                if stochastic.is_some() { sample.fill(2, Values::Ids(1 << 24)) } else { sample }
            };
            res.extend(shapes.into_iter().flat_map(|it| holding_each(&make(it, &[], &[]))));
            // Amaxes of which the factors are at the ends of what there is.
            for amax in [0.0, 1e-40, 3e38, f64::INFINITY, f64::NAN] {
                let cases = in_both(make(shapes[1], &[], &[])).into_iter();
                res.extend(cases.map(|it| it.holding(1, Content::All(amax))));
            }
            res.extend(in_both(make(&[4, 96, 160], &[2, 3, 2], &[0, 1, 2])));
            if stochastic.is_some() {
                // A rank that holds the middle of all dims.
                let bounds = [(3, 2, 7), (32, 48, 160), (64, 96, 512)];
                let bounds = bounds.map(|(start, extent, size)| LocalBound { start, extent, size });
                for mut case in in_both(make(&[2, 48, 96], &[2], &[0])) {
                    case.calls[0].bounds = Some(bounds.to_vec());
                    res.push(case);
                }
            }
        }
    }
    res
}

fn hadamard() -> Vec<Case> {
    let shapes: [&[u64]; 3] = [&[16, 1], &[3, 48, 37], &[640, 1001]];
    shapes.iter().flat_map(|it| holding_each(&Sample::floats(Hadamard {}, &[it]))).collect()
}

/// Bytes in another order, and at odd places.
fn moves() -> Vec<Case> {
    let transposed = |perm: &[usize]| -> Op { Transpose { perm: perm.to_vec() }.into() };
    let part: Op = SliceDim { dim: 1, start: 3, len: 50 }.into();
    let padded: Op = PadDim { dim: 1, start: 1, size: 70 }.into();
    let cases: [(Op, &[&[u64]]); 10] = [
        (transposed(&[1, 0]), &[&[129, 67]]),
        (transposed(&[1, 0]), &[&[72, 200]]),
        (transposed(&[1, 0]), &[&[512, 384]]),
        (transposed(&[2, 0, 1]), &[&[3, 67, 40]]),
        (transposed(&[0, 2, 1]), &[&[3, 67, 41]]),
        (transposed(&[1, 0, 2]), &[&[5, 6, 7]]),
        (part, &[&[33, 67]]),
        (padded, &[&[33, 67]]),
        (Concat { dim: 1 }.into(), &[&[33, 5], &[33, 8], &[33, 1]]),
        (Fill { value: 0.3125.into(), dtype: DType::E5M2, shape: vec![1001] }.into(), &[]),
    ];
    let case = |(op, shapes): (Op, &[&[u64]])| {
        let mut sample = Sample::floats(op, shapes);
        sample.inputs.iter_mut().for_each(|it| it.ty.dtype = DType::E4M3);
        one(call(&sample), DType::F32)
    };
    cases.into_iter().map(case).collect()
}

/// A product of codes of these types, positive scales.
fn product(op: QuantMatmul, types: [DType; 2], shapes: &[&[u64]]) -> Case {
    let mut sample = Sample::floats(op.clone(), shapes);
    sample.inputs[0].ty.dtype = types[0];
    sample.inputs[1].ty.dtype = types[1];
    sample.inputs[4..].iter_mut().for_each(|it| it.ty.dtype = op.out);
    one(call(&sample.fill(2, Values::Positive).fill(3, Values::Positive)), op.out)
}

/// A product of matrices, and that with a bias. `shapes` are those of codes and scales.
fn products(op: QuantMatmul, types: [DType; 2], shapes: &[&[u64]; 4]) -> [Case; 2] {
    let (m, n) = (shapes[0][0], shapes[1][0]);
    [false, true].map(|bias| {
        let op = QuantMatmul { bias, ..op.clone() };
        let (sum, row): (&[u64], &[u64]) = (&[m, n], &[n]);
        let added = [op.accumulate.then_some(sum), bias.then_some(row)];
        let shapes: Vec<&[u64]> =
            shapes.iter().copied().chain(added.into_iter().flatten()).collect();
        product(op, types, &shapes)
    })
}

/// One number of each operand; sizes that cuBLASLt takes, and others.
fn matmul() -> Vec<Case> {
    use DType::{Bf16, E4M3, E5M2, F32};
    let sizes =
        [(1, 5, 3), (129, 257, 191), (64, 1008, 512), (1, 16, 16), (37, 48, 640), (300, 256, 2000)];
    let mut res = Vec::new();
    for (m, n, k) in sizes {
        for types in [[E4M3, E4M3], [E4M3, E5M2], [E5M2, E4M3]] {
            for out in [F32, Bf16] {
                for (accumulate, fast) in
                    [(false, false), (false, true), (true, false), (true, true)]
                {
                    let (a, b) = (Granule::default(), Granule::default());
                    let op = QuantMatmul { out, accumulate, bias: false, fast, a, b };
                    let shapes: [&[u64]; 4] = [&[m, k], &[n, k], &[], &[]];
                    res.extend(products(op, types, &shapes));
                }
            }
        }
    }
    let plain = QuantMatmul {
        out: F32,
        accumulate: false,
        bias: false,
        fast: true,
        a: Granule::default(),
        b: Granule::default(),
    };
    // A gradient of weights: two dims are contracted. An activation of two.
    res.push(product(plain.clone(), [E5M2, E4M3], &[&[64, 3, 160], &[48, 3, 160], &[], &[]]));
    res.push(product(plain.clone(), [E4M3, E4M3], &[&[3, 50, 160], &[48, 160], &[], &[]]));
    // Scales of pieces: our own kernel.
    let pieces = |a: &[usize], b: &[usize]| QuantMatmul {
        a: Granule::Tensor(a.to_vec()),
        b: Granule::Tensor(b.to_vec()),
        ..plain.clone()
    };
    let types = [E4M3, E5M2];
    res.push(product(pieces(&[0, 2], &[0]), types, &[&[4, 6, 32], &[48, 32], &[2, 4], &[3]]));
    res.push(product(pieces(&[1], &[1]), types, &[&[32, 4, 8], &[16, 4, 8], &[2], &[2]]));
    // A bias under three dims, and of our own kernel.
    let biased = |op: QuantMatmul| QuantMatmul { bias: true, ..op };
    for out in [F32, Bf16] {
        let op = biased(QuantMatmul { out, ..plain.clone() });
        res.push(product(op, types, &[&[3, 50, 160], &[48, 160], &[], &[], &[48]]));
        let op = biased(QuantMatmul { out, ..pieces(&[0, 2], &[0]) });
        res.push(product(op, types, &[&[4, 6, 32], &[48, 32], &[2, 4], &[3], &[48]]));
    }
    res
}

/// 128 numbers of a row, 128 rows of them.
fn matmul_in_blocks() -> Vec<Case> {
    use DType::{Bf16, E4M3, E5M2, F32};
    let mut res = Vec::new();
    // The second has blocks whose number in a row is no multiple of 4; of the last, rows have none.
    for (m, n, k) in [(128, 256, 512), (384, 128, 640), (130, 128, 256)] {
        let blocks = |rows: u64| vec![rows / 128, k / 128];
        let rows = |rows: u64| vec![k / 128, rows];
        for (a, b) in [
            (Granule::Row, Granule::Row),
            (Granule::Row, Granule::Block),
            (Granule::Block, Granule::Row),
        ] {
            let scale =
                |it: &Granule, n: u64| if *it == Granule::Block { blocks(n) } else { rows(n) };
            if a == Granule::Block && m % 128 != 0 {
                continue;
            }
            for (out, accumulate) in [(F32, false), (F32, true), (Bf16, false), (Bf16, true)] {
                let (a_scale, b_scale) = (scale(&a, m), scale(&b, n));
                let (a, b) = (a.clone(), b.clone());
                let op = QuantMatmul { out, accumulate, bias: false, fast: true, a, b };
                let shapes: [&[u64]; 4] = [&[m, k], &[n, k], &a_scale, &b_scale];
                let types = if accumulate { [E5M2, E4M3] } else { [E4M3, E4M3] };
                res.extend(products(op, types, &shapes));
            }
        }
    }
    res
}
