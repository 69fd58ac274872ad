//! `quant_matmul`: a GEMM on FP8 codes, with their scales in it.
//!
//! ```text
//! fprop  x[* k]     w[n k]      -> y[* n]      rows of x, rows of w
//! dgrad  dy[* n]    w^T[k n]    -> dx[* k]     rows of dy, columns of w
//! wgrad  dy^T[n *]  x^T[k *]    -> dw[n k]     columns of both
//! ```
//!
//! Both operands contract their last dims (the one form of Hopper's FP8 GEMMs); the second has one dim before
//! them. The product of codes is summed in f32 over a range of the contraction in which both scales are
//! constant, and then multiplied by both inverse scales.
//!
//! With `accumulate` and `bias` the result is `a b + c + bias`, summed in f32 and rounded once, as that of
//! [`matmul`](super::matmul) is.

use serde::{Deserialize, Serialize};
use smallvec::smallvec;

use crate::ops::factors::letters;
use crate::ops::tensor::dot;
use crate::ops::{
    Engine, Factors, Fp8Scales, Gemm, LocalCx, Op, OpDef, OpKind, Origin, Real, Sample, Shape,
    StandsFor, TypeError, Types, Values, View, ViewMut, arity, is_default, ndim, ndim_at_least,
    pieces, same_shape, same_size,
};
use crate::quant::blocks::FP8_BLOCK as BLOCK;
use crate::types::{DType, TensorType};

/// See the [module docs](self). Operands: `a`, `b`, the inverse scale of each (f32), then `c` of the result's
/// type if it accumulates, then `bias` (one number for each column of the result, of its element type) if there
/// is one.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct QuantMatmul {
    /// Element type of the result.
    pub out: DType,
    /// Adds to an operand of the result's type, possibly in place.
    #[serde(default, skip_serializing_if = "is_default")]
    pub accumulate: bool,
    /// Adds a vector to every row of the result.
    #[serde(default, skip_serializing_if = "is_default")]
    pub bias: bool,
    /// Sums may be kept in fewer bits than f32 has: the fast accumulation of Hopper's tensor cores.
    #[serde(default, skip_serializing_if = "is_default")]
    pub fast: bool,
    /// How much of `a` has a scale of its own.
    #[serde(default, skip_serializing_if = "is_default")]
    pub a: Granule,
    /// How much of `b` has a scale of its own.
    #[serde(default, skip_serializing_if = "is_default")]
    pub b: Granule,
}

/// How much of an operand has a scale of its own, and the shape of its scales.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Granule {
    /// All of it, or each piece along these dims. Scale: the number of pieces of each. Of the
    /// contracted dims only the first may be in pieces.
    Tensor(Vec<usize>),
    /// 128 numbers along the last dim. Scale: the contracted dims, the last of them over 128, then the others;
    /// cuBLASLt's `VEC128`.
    Row,
    /// 128 x 128 numbers along the last contracted dim and the last of the others. Scale: the dims of the
    /// operand, those two over 128.
    Block,
}

impl Default for Granule {
    fn default() -> Granule {
        Granule::Tensor(Vec::new())
    }
}

impl Granule {
    /// Dims in pieces.
    fn pieces(&self) -> &[usize] {
        match self {
            Granule::Tensor(dims) => dims,
            Granule::Row | Granule::Block => &[],
        }
    }

    /// The shape of the scales of `x`, whose last `contracted` dims are contracted; `given` are the pieces.
    fn scale_shape(
        &self,
        x: &TensorType,
        contracted: usize,
        given: &Shape,
    ) -> Result<Shape, TypeError> {
        let over = |size: u64| match size % BLOCK {
            0 => Ok(size / BLOCK),
            _ => Err(TypeError::Multiple { what: "a dim in blocks", size, of: BLOCK }),
        };
        let rows = x.ndim() - contracted;
        match self {
            Granule::Tensor(_) => Ok(given.clone()),
            Granule::Row => {
                let mut res = Shape::from_slice(&x.shape[rows..]);
                let last = res.last_mut().expect("something is contracted");
                *last = over(*last)?;
                res.extend_from_slice(&x.shape[..rows]);
                Ok(res)
            }
            Granule::Block => {
                let mut res = x.shape.clone();
                for dim in [rows - 1, x.ndim() - 1] {
                    res[dim] = over(res[dim])?;
                }
                Ok(res)
            }
        }
    }

    /// Einsum notation of an operand whose dims are `names`, and of its scales. `split` dims of it have more
    /// than one factor because of the other operand.
    fn notation(&self, names: &str, contracted: usize, split: &str) -> (String, String) {
        let rows = names.len() - contracted;
        let dims: String = names
            .chars()
            .map(|it| match split.contains(it) {
                true => format!("({} {it}) ", it.to_ascii_uppercase()),
                false => format!("{it} "),
            })
            .collect();
        let upper = |it: &str| it.to_ascii_uppercase();
        let scale = match self {
            Granule::Tensor(dims) => pieces::scale_notation(names, dims),
            Granule::Row => {
                let (left, right) = names.split_at(rows);
                let (leading, last) = right.split_at(contracted - 1);
                [leading, &upper(last), left].concat()
            }
            Granule::Block => {
                let splits = self.splits(names, contracted);
                let part =
                    |it: char| if splits.contains(it) { it.to_ascii_uppercase() } else { it };
                names.chars().map(part).collect()
            }
        };
        (dims, scale)
    }

    /// Names of dims that this scale splits in two factors.
    fn splits(&self, names: &str, contracted: usize) -> String {
        match self {
            Granule::Tensor(dims) => dims.iter().map(|&it| names.as_bytes()[it] as char).collect(),
            Granule::Row => names.chars().last().into_iter().collect(),
            Granule::Block => {
                let row = names.as_bytes()[names.len() - contracted - 1] as char;
                std::iter::once(row).chain(names.chars().last()).collect()
            }
        }
    }

    /// Position in the scales for row `row` and segment `segment` of the contraction. `rows` and `segments`
    /// are their numbers.
    fn position(
        &self,
        x: &[usize],
        scale: &[usize],
        (row, segment): (usize, usize),
        (rows, segments): (usize, usize),
    ) -> usize {
        match self {
            Granule::Row => segment * rows + row,
            Granule::Block => row / BLOCK as usize * segments + segment,
            Granule::Tensor(dims) => {
                let k = x.iter().product::<usize>() / rows.max(1);
                pieces::position(x, scale, dims, row * k + segment * (k / segments.max(1)))
            }
        }
    }
}

impl QuantMatmul {
    /// The GEMM on operands of these local shapes.
    pub fn gemm(&self, a: &[usize], b: &[usize]) -> Gemm {
        let k: usize = b[1..].iter().product();
        let m: usize = a[..a.len() + 1 - b.len()].iter().product();
        Gemm { m, n: b[0], k, a_strides: [k, 1], b_strides: [1, k] }
    }

    /// The operands that are added to the product: `c` and the bias.
    pub fn addends<T: Copy>(&self, operands: &[T]) -> (Option<T>, Option<T>) {
        let c = self.accumulate.then(|| operands[4]);
        (c, self.bias.then(|| operands[4 + usize::from(self.accumulate)]))
    }

    /// The inverse scales of operand 0 or 1 for a range of the contraction, one for each of its `rows`.
    pub fn inverse_scales<T: Copy>(
        &self,
        inputs: &[View<'_, T>],
        operand: usize,
        rows: usize,
        (segment, segments): (usize, usize),
    ) -> Vec<T> {
        let (x, scale) = (&inputs[operand], &inputs[operand + 2]);
        let granule = if operand == 0 { &self.a } else { &self.b };
        let at = |row| granule.position(x.shape, scale.shape, (row, segment), (rows, segments));
        (0..rows).map(|row| scale.data[at(row)]).collect()
    }

    /// How many ranges of the contraction have scales of their own, on operands of these local shapes.
    pub fn segments(&self, inputs: &[&[usize]]) -> usize {
        let (a, b) = (inputs[0], inputs[1]);
        let rows = a.len() + 1 - b.len();
        let of = |granule: &Granule, scale: &[usize], first: usize| match granule {
            Granule::Row | Granule::Block => b[1..].iter().product::<usize>() / BLOCK as usize,
            Granule::Tensor(dims) => {
                dims.iter().position(|&it| it == first).map_or(1, |it| scale[it])
            }
        };
        of(&self.a, inputs[2], rows).max(of(&self.b, inputs[3], 1))
    }

    /// Names of the dims of both operands.
    fn names(a: &TensorType, b: &TensorType) -> [String; 2] {
        let contracted = b.ndim() - 1;
        let names = letters(0..a.ndim());
        let b_names = format!("n{}", &names[a.ndim() - contracted..]);
        [names, b_names]
    }
}

impl OpDef for QuantMatmul {
    const ORIGINS: &'static [Origin] = &[Origin::Recipe];

    fn infer(&self, inputs: &[&TensorType]) -> Result<Types, TypeError> {
        arity(inputs, 4 + usize::from(self.accumulate) + usize::from(self.bias))?;
        let (a, b) = (inputs[0], inputs[1]);
        for operand in 0..2 {
            let found = inputs[operand].dtype;
            if !found.is_fp8() {
                return Err(TypeError::DType { operand, found, expected: "e4m3 or e5m2" });
            }
            let found = inputs[operand + 2].dtype;
            if found != DType::F32 {
                return Err(TypeError::DType { operand: operand + 2, found, expected: "f32" });
            }
        }
        if !self.out.is_float() {
            return Err(TypeError::Attribute { why: "a product is f32 or bf16" });
        }
        ndim_at_least(inputs, 1, 2, "at least 2 dims")?;
        ndim_at_least(inputs, 0, b.ndim(), "as many dims as operand 1, at least")?;
        let contracted = b.ndim() - 1;
        let rows = a.ndim() - contracted;
        for (&left, &right) in a.shape[rows..].iter().zip(&b.shape[1..]) {
            same_size("contracted sizes", left, right)?;
        }
        for (granule, x, scale, n_rows) in
            [(&self.a, a, inputs[2], rows), (&self.b, b, inputs[3], 1)]
        {
            if let Granule::Tensor(dims) = granule {
                pieces::check(x, scale, dims)?;
                if dims.iter().any(|&it| it > n_rows) {
                    let why = "of contracted dims only the first may be in pieces";
                    return Err(TypeError::Attribute { why });
                }
            }
            let expected = granule.scale_shape(x, contracted, &scale.shape)?;
            same_shape(&TensorType { dtype: DType::F32, shape: expected }, scale)?;
        }
        let piece = |granule: &Granule, scale: &TensorType, first: usize| {
            granule.pieces().iter().position(|&it| it == first).map(|it| scale.shape[it])
        };
        if let (Some(left), Some(right)) =
            (piece(&self.a, inputs[2], rows), piece(&self.b, inputs[3], 1))
        {
            same_size("pieces of the contraction", left, right)?;
        }
        let tensor = |it: &Granule| matches!(it, Granule::Tensor(_));
        if tensor(&self.a) != tensor(&self.b) {
            return Err(TypeError::Attribute { why: "either both operands are in blocks or none" });
        }
        let mut shape = Shape::from_slice(&a.shape[..rows]);
        shape.push(b.shape[0]);
        let res = TensorType { dtype: self.out, shape };
        let (c, bias) = self.addends(inputs);
        if let Some(c) = c {
            same_shape(&res, c)?;
        }
        if let Some(bias) = bias {
            ndim(inputs, inputs.len() - 1, 1, "1 dim")?;
            same_size("columns and biases", res.shape[rows], bias.shape[0])?;
        }
        for (operand, it) in inputs.iter().enumerate().skip(4) {
            if it.dtype != self.out {
                let (found, expected) = (it.dtype, "that of the result");
                return Err(TypeError::DType { operand, found, expected });
            }
        }
        Ok(smallvec![res])
    }

    /// `c` and the bias are added to the sum, so they are partial where it is. A padded row would become the
    /// bias.
    fn factors(&self, inputs: &[&TensorType], results: &[&TensorType]) -> Factors {
        let (a, b) = (inputs[0], inputs[1]);
        let contracted = b.ndim() - 1;
        let names = QuantMatmul::names(a, b);
        let splits = [self.a.splits(&names[0], contracted), self.b.splits(&names[1], contracted)];
        let split = splits.concat();
        let (a_text, a_scale) = self.a.notation(&names[0], contracted, &split);
        let (b_text, b_scale) = self.b.notation(&names[1], contracted, &split);
        let rows = &names[0][..a.ndim() - contracted];
        let (row_text, _) = Granule::default().notation(rows, 0, &split);
        let (n_text, _) = Granule::default().notation("n", 0, &split);
        let res = format!("{row_text} {n_text}");
        let c = if self.accumulate { format!(", {res}") } else { String::new() };
        let bias = if self.bias { format!(", {n_text}") } else { String::new() };
        let text = format!("{a_text}, {b_text}, {a_scale}, {b_scale}{c}{bias} -> {res}");
        // Either the number of pieces is known, from the scale, or the size of a block.
        let mut sizes: Vec<(char, u64)> = Vec::new();
        let mut whole = String::new();
        for (granule, names, splits, scale) in [
            (&self.a, &names[0], &splits[0], inputs[2]),
            (&self.b, &names[1], &splits[1], inputs[3]),
        ] {
            match granule {
                Granule::Tensor(dims) => sizes.extend(pieces::sizes(names, dims, &scale.shape)),
                Granule::Row | Granule::Block => {
                    sizes.extend(splits.chars().map(|it| (it, BLOCK)));
                    whole.push_str(splits);
                }
            }
        }
        let factors = Factors::with_sizes(&text, &sizes, inputs, results).whole(&whole).add_from(4);
        if self.bias { factors.even(&[rows, &rows.to_ascii_uppercase()].concat()) } else { factors }
    }

    fn reference<T: Real>(
        &self,
        inputs: &[View<'_, T>],
        results: &mut [ViewMut<'_, T>],
        _cx: &LocalCx<'_>,
    ) {
        let (a, b) = (inputs[0], inputs[1]);
        let (c, bias) = self.addends(inputs);
        let gemm = self.gemm(a.shape, b.shape);
        let shapes: Vec<&[usize]> = inputs.iter().map(|it| it.shape).collect();
        let segments = self.segments(&shapes).max(1);
        let length = gemm.k / segments;
        for i in 0..gemm.m {
            for j in 0..gemm.n {
                let mut sum = T::zero();
                for segment in 0..segments {
                    let range = segment * length..(segment + 1) * length;
                    let (a_row, b_row) = (&a.data[i * gemm.k..], &b.data[j * gemm.k..]);
                    let product = dot(&a_row[range.clone()], &b_row[range]);
                    let at = (i, segment);
                    let a_at = self.a.position(a.shape, inputs[2].shape, at, (gemm.m, segments));
                    let at = (j, segment);
                    let b_at = self.b.position(b.shape, inputs[3].shape, at, (gemm.n, segments));
                    sum += product * (inputs[2].data[a_at] * inputs[3].data[b_at]);
                }
                let at = i * gemm.n + j;
                let c = c.map_or(T::zero(), |it| it.data[at]);
                let bias = bias.map_or(T::zero(), |it| it.data[j]);
                results[0].data[at] = sum + c + bias;
            }
        }
    }

    fn flops(&self, inputs: &[&[u64]], _results: &[&[u64]]) -> u64 {
        let shape = |it: &[u64]| -> Vec<usize> { it.iter().map(|&it| it as usize).collect() };
        self.gemm(&shape(inputs[0]), &shape(inputs[1])).flops()
    }

    fn in_place(&self) -> &'static [(usize, usize)] {
        if self.accumulate { &[(0, 4)] } else { &[] }
    }

    fn stands_for(&self, _inputs: &[&TensorType]) -> StandsFor {
        StandsFor::Op(OpKind::Matmul)
    }

    fn without(&self, operand: usize) -> Option<Op> {
        let plain = || QuantMatmul { accumulate: false, ..self.clone() }.into();
        (self.accumulate && operand == 4).then(plain)
    }

    fn engine(&self) -> Engine {
        let tensor = |it: &Granule| matches!(it, Granule::Tensor(_));
        let scales = match (&self.a, &self.b) {
            (Granule::Row, Granule::Row) => Fp8Scales::Row,
            (a, b) if tensor(a) && tensor(b) => Fp8Scales::Tensor,
            _ => Fp8Scales::Block,
        };
        Engine::Fp8Gemm { scales, fast: self.fast }
    }

    fn samples() -> Vec<Sample> {
        let op = |a, b| QuantMatmul {
            out: DType::F32,
            accumulate: false,
            bias: false,
            fast: false,
            a,
            b,
        };
        let tensor = |dims: &[usize]| Granule::Tensor(dims.to_vec());
        let sample = |op: QuantMatmul, shapes: &[&[u64]]| {
            let mut res = Sample::floats(op, shapes);
            res.inputs[0].ty.dtype = DType::E4M3;
            res.inputs[1].ty.dtype = DType::E5M2;
            res.fill(2, Values::Positive).fill(3, Values::Positive)
        };
        let plain = op(tensor(&[]), tensor(&[]));
        let added = QuantMatmul { accumulate: true, ..plain.clone() };
        let biased = |op: QuantMatmul| QuantMatmul { bias: true, ..op };
        vec![
            sample(biased(plain.clone()), &[&[2, 4, 6], &[8, 6], &[], &[], &[8]]),
            sample(biased(added.clone()), &[&[4, 2, 6], &[8, 6], &[], &[], &[4, 2, 8], &[8]]),
            sample(
                biased(op(tensor(&[0, 2]), tensor(&[0]))),
                &[&[4, 2, 8], &[4, 8], &[2, 2], &[4], &[4]],
            ),
            sample(
                biased(op(Granule::Row, Granule::Block)),
                &[&[2, 3, 256], &[256, 256], &[2, 2, 3], &[2, 2], &[256]],
            ),
            sample(plain, &[&[2, 4, 6], &[8, 6], &[], &[]]),
            sample(added, &[&[4, 2, 6], &[8, 2, 6], &[], &[], &[4, 8]]),
            sample(op(tensor(&[0, 2]), tensor(&[0])), &[&[4, 2, 8], &[4, 8], &[2, 2], &[4]]),
            sample(op(tensor(&[1]), tensor(&[1])), &[&[4, 2, 8], &[4, 2, 8], &[2], &[2]]),
            sample(
                op(Granule::Row, Granule::Block),
                &[&[2, 3, 256], &[256, 256], &[2, 2, 3], &[2, 2]],
            ),
            sample(
                op(Granule::Block, Granule::Row),
                &[&[2, 128, 256], &[4, 256], &[2, 1, 2], &[2, 4]],
            ),
            sample(
                op(Granule::Row, Granule::Row),
                &[&[4, 2, 128], &[2, 2, 128], &[2, 1, 4], &[2, 1, 2]],
            ),
        ]
    }
}
