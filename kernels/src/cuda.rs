//! What a GPU runs for an op: kernels of our own, a GEMM, attention, a copy.
//!
//! Nothing here needs CUDA: [`lower`] turns ops on local operands into a [`Program`], plain data that
//! `runtime::backend::cuda` executes. The sources of our own kernels are `kernels/cuda/*.cu`; NVRTC
//! compiles them when a plan is loaded. To add a kernel: write its `.cu`, list it in [`SOURCES`],
//! write the file here that makes its [`Launch`], add an arm to [`lower`].

mod add;
mod amax;
pub mod attention;
mod boxes;
mod call;
mod clip_scale;
mod copy;
mod cross_entropy;
mod dropout;
mod elementwise;
mod embedding;
mod fill;
mod fused;
mod launch;
mod matmul;
mod norm;
mod optimizer;
mod pieces;
mod quant_matmul;
mod quant_scale;
mod quantize;
mod quantize_block;
mod rope;
mod round_blocks;
mod scratch;
mod sum_leading;
mod sum_squares;
#[cfg(test)]
mod tests;
pub mod transport;
mod transpose;

use std::fmt;

use ir::ops::LocalBound;
use ir::{DType, Op};
use smallvec::SmallVec;

use fused::Map;

pub use call::Call;
pub use fused::runs;
pub use scratch::{Scratch, scratch};

/// The architecture that our kernels are compiled for where there is no GPU to ask.
pub const DEFAULT_ARCH: &str = "sm_90a";

/// Scratch of every GEMM, in bytes.
pub const GEMM_WORKSPACE: u64 = 64 << 20;

/// Headers that the sources include, with their text.
pub const HEADERS: &[(&str, &str)] = &[
    ("activation.cuh", include_str!("../cuda/activation.cuh")),
    ("amax.cuh", include_str!("../cuda/amax.cuh")),
    ("codes.cuh", include_str!("../cuda/codes.cuh")),
    ("common.cuh", include_str!("../cuda/common.cuh")),
    ("norm.cuh", include_str!("../cuda/norm.cuh")),
    ("pieces.cuh", include_str!("../cuda/pieces.cuh")),
    ("put.cuh", include_str!("../cuda/put.cuh")),
    ("random.cuh", include_str!("../cuda/random.cuh")),
];

/// The sources of our kernels, with their text.
pub const SOURCES: &[(&str, &str)] = &[
    ("activation.cu", include_str!("../cuda/activation.cu")),
    ("add.cu", include_str!("../cuda/add.cu")),
    ("amax.cu", include_str!("../cuda/amax.cu")),
    ("attention.cu", include_str!("../cuda/attention.cu")),
    ("bias_add.cu", include_str!("../cuda/bias_add.cu")),
    ("boxes.cu", include_str!("../cuda/boxes.cu")),
    ("ce_loss.cu", include_str!("../cuda/ce_loss.cu")),
    ("clip_scale.cu", include_str!("../cuda/clip_scale.cu")),
    ("copy.cu", include_str!("../cuda/copy.cu")),
    ("cross_entropy.cu", include_str!("../cuda/cross_entropy.cu")),
    ("dropout.cu", include_str!("../cuda/dropout.cu")),
    ("elementwise.cu", include_str!("../cuda/elementwise.cu")),
    ("embedding.cu", include_str!("../cuda/embedding.cu")),
    ("embedding_grad.cu", include_str!("../cuda/embedding_grad.cu")),
    ("fill.cu", include_str!("../cuda/fill.cu")),
    ("glu.cu", include_str!("../cuda/glu.cu")),
    ("hadamard.cu", include_str!("../cuda/hadamard.cu")),
    ("norm.cu", include_str!("../cuda/norm.cu")),
    ("norm_grad.cu", include_str!("../cuda/norm_grad.cu")),
    ("optimizer.cu", include_str!("../cuda/optimizer.cu")),
    ("quant_matmul.cu", include_str!("../cuda/quant_matmul.cu")),
    ("quant_scale.cu", include_str!("../cuda/quant_scale.cu")),
    ("quantize.cu", include_str!("../cuda/quantize.cu")),
    ("quantize_block.cu", include_str!("../cuda/quantize_block.cu")),
    ("rope.cu", include_str!("../cuda/rope.cu")),
    ("round_blocks.cu", include_str!("../cuda/round_blocks.cu")),
    ("sum_leading.cu", include_str!("../cuda/sum_leading.cu")),
    ("sum_squares.cu", include_str!("../cuda/sum_squares.cu")),
    ("transpose.cu", include_str!("../cuda/transpose.cu")),
];

/// An op for which there is no program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unsupported {
    /// The op in text form.
    pub op: String,
    /// What about it no kernel does.
    pub why: String,
}

impl Unsupported {
    fn new(call: &OpCall<'_>, why: impl Into<String>) -> Unsupported {
        Unsupported { op: call.op.to_text(), why: why.into() }
    }
}

impl fmt::Display for Unsupported {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "no CUDA kernel for `{}`: {}", self.op, self.why)
    }
}

impl std::error::Error for Unsupported {}

/// What a GPU runs for an op, or for several of which each is [`batchable`] with the first.
///
/// # Panics
/// If there is no call, or several that are not to be batched.
pub fn lower(calls: &[OpCall<'_>]) -> Result<Program, Unsupported> {
    let [call, rest @ ..] = calls else { panic!("a program is for at least one op") };
    assert!(rest.iter().all(|it| batchable(call, it)), "a batch is of ops that go together");
    if calls.iter().flat_map(|it| it.results).all(|it| launch::elements(it) == 0) {
        return Ok(Program::default());
    }
    if let Some(map) = Map::of(call.op) {
        return elementwise::map(call, &map);
    }
    match call.op {
        Op::Activation(_) | Op::ActivationGrad(_) | Op::Glu(_) | Op::GluGrad(_) => {
            unreachable!("these are maps")
        }
        Op::AdamW(_) | Op::Adam(_) | Op::Sgd(_) => optimizer::lower(calls),
        Op::Add(_) | Op::BiasAdd(_) => add::lower(call),
        Op::Amax(_) => amax::lower(calls),
        Op::Attention(_) | Op::AttentionGrad(_) => attention::lower(call),
        Op::Cast(_) | Op::Div(_) | Op::Mul(_) | Op::Scale(_) => elementwise::lower(call),
        Op::CeLoss(_) | Op::CeLossGrad(_) => cross_entropy::lower(call),
        Op::CeMax(_) | Op::CeStats(_) | Op::CeStatsGrad(_) => cross_entropy::lower(call),
        Op::CrossEntropy(_) => cross_entropy::lower(call),
        Op::ClipScale(_) => clip_scale::lower(call),
        Op::Concat(_) | Op::PadDim(_) | Op::SliceDim(_) => copy::lower(call),
        Op::DelayedScale(_) | Op::DelayedUpdate(_) => quant_scale::lower(calls),
        Op::Dropout(_) => dropout::lower(call),
        Op::Embedding(_) | Op::EmbeddingGrad(_) => embedding::lower(call),
        Op::Fill(_) | Op::ZerosLike(_) => fill::lower(call),
        // What is no map quantizes.
        Op::Fused(_) | Op::Quantize(_) => quantize::lower(calls),
        Op::Hadamard(_) => round_blocks::hadamard(call),
        Op::LayerNorm(_) | Op::LayerNormGrad(_) => norm::lower(call),
        Op::Matmul(_) => matmul::lower(call),
        Op::MergeDims(_) | Op::SplitDim(_) => Ok(elementwise::copy(call)),
        Op::QuantMatmul(_) => quant_matmul::lower(call),
        Op::QuantScale(_) => quant_scale::lower(calls),
        Op::QuantizeBlock(_) => quantize_block::lower(calls),
        Op::RmsNorm(_) | Op::RmsNormGrad(_) => norm::lower(call),
        Op::Rope(_) => rope::lower(call),
        Op::RoundMx(_) | Op::RoundNvFp4(_) => round_blocks::lower(call),
        Op::SumLeading(_) => sum_leading::lower(call),
        Op::SumSquares(_) => sum_squares::lower(calls),
        Op::Transpose(_) => transpose::lower(call),
        Op::Watch(_) => clip_scale::watch(call),
        Op::Collective(_) | Op::Reshard(_) => {
            Err(Unsupported::new(call, "data between ranks is moved by the communicator"))
        }
    }
}

/// Whether one program may do both: the same op on the same element types, with attributes that may
/// differ only in what a table holds for each tensor. That scalar operands are the same values too,
/// and that neither needs the other's result, is for the caller to see.
pub fn batchable(a: &OpCall<'_>, b: &OpCall<'_>) -> bool {
    // Amaxes and scales of pieces are not for a table.
    let numbers = |it: &OpCall<'_>| match it.op {
        Op::Amax(_) => is_one(it.results, 0),
        Op::Quantize(_) => is_one(it.args, 1),
        _ => true,
    };
    let same_op = a.op.batches_with(b.op) && numbers(a) && numbers(b);
    let dtypes =
        |a: &[Operand], b: &[Operand]| a.iter().map(|it| it.dtype).eq(b.iter().map(|it| it.dtype));
    same_op && dtypes(a.args, b.args) && dtypes(a.results, b.results)
}

/// Whether an operand is one number.
fn is_one(operands: &[Operand], index: usize) -> bool {
    operands.get(index).is_some_and(|it| launch::elements(it) == 1)
}

/// An op on one rank's operands.
#[derive(Debug, Clone, Copy)]
pub struct OpCall<'a> {
    /// The op, with local attributes.
    pub op: &'a Op,
    /// Operands.
    pub args: &'a [Operand],
    /// Results. One may share the memory of an operand where [`Op::in_place`] lists the pair.
    pub results: &'a [Operand],
    /// One for each of the op's bounds.
    pub bounds: &'a [LocalBound],
}

/// A dense, row-major tensor in device memory, aligned to 256 bytes.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Operand {
    /// How elements are stored.
    pub dtype: DType,
    /// Sizes of the local buffer, padding included.
    pub shape: SmallVec<[usize; 4]>,
}

/// What runs for one op, or for a batch of them.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Program {
    /// The work, in order on one stream.
    pub work: SmallVec<[Work; 2]>,
    /// Bytes of scratch that it needs, aligned to 256 bytes; any content before, garbage after.
    pub workspace: u64,
    /// The words that it reads from device memory, written once when the plan is loaded. The length depends on the
    /// number of tensors, not on their sizes. [`Program::table_words`] says how many words of memory it takes.
    pub table: Vec<Word>,
}

impl Program {
    /// Words of device memory that the table takes.
    pub fn table_words(&self) -> u64 {
        self.table.iter().map(|it| it.n()).sum()
    }
}

/// A piece of work on one stream.
#[derive(Debug, Clone, PartialEq)]
pub enum Work {
    /// A kernel of our own.
    Launch(Launch),
    /// A matrix product.
    Gemm(GemmCall),
    /// Scaled dot-product attention.
    Attention(AttentionCall),
    /// Sets bytes.
    Fill {
        /// What.
        to: Pointer,
        /// How many bytes.
        bytes: u64,
        /// To what.
        value: u8,
    },
    /// Copies bytes from one buffer to another; none if they are the same memory.
    Copy {
        /// Source.
        from: Pointer,
        /// Destination.
        to: Pointer,
        /// How many bytes.
        bytes: u64,
    },
}

/// An address, resolved when the plan is loaded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Pointer {
    /// Operand `.0`, counted through all calls of a batch: those of the second follow the first's.
    Arg(u32),
    /// Result `.0`, likewise.
    Result(u32),
    /// Byte `.0` of the workspace.
    Workspace(u64),
    /// Word `.0` of the table.
    Table(u32),
}

/// A word of a [`Program`]'s table, or several of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Word {
    /// An address.
    Pointer(Pointer),
    /// Eight bytes.
    Value(u64),
    /// A word for each piece of a tensor: `of` in the lower half, and 0, 1, .. `n - 1` in the upper half. It
    /// must follow all other words, so that their indices stay valid.
    Pieces {
        /// The number of the tensor.
        of: u32,
        /// The number of its pieces.
        n: u64,
    },
}

impl Word {
    /// The number of words of device memory that it stands for.
    pub fn n(self) -> u64 {
        match self {
            Word::Pointer(_) | Word::Value(_) => 1,
            Word::Pieces { n, .. } => n,
        }
    }
}

/// One launch of one of our kernels.
#[derive(Debug, Clone, PartialEq)]
pub struct Launch {
    /// Which.
    pub function: Function,
    /// Blocks.
    pub grid: [u32; 3],
    /// Threads of a block, in one dimension.
    pub block: u32,
    /// Bytes of dynamic shared memory.
    pub shared: u32,
    /// Arguments, in the kernel's order.
    pub args: Vec<Arg>,
}

/// A function of a module: a source, specialized by macros.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Function {
    /// Name of an entry of [`SOURCES`].
    pub source: &'static str,
    /// Macros as `NAME=VALUE`, in order.
    pub defines: Vec<String>,
    /// The `extern "C"` name.
    pub entry: &'static str,
}

/// An argument of a kernel.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Arg {
    /// A pointer.
    Pointer(Pointer),
    /// `int`.
    I32(i32),
    /// `unsigned`.
    U32(u32),
    /// `long long`.
    I64(i64),
    /// `float`.
    F32(f32),
}

/// `out[m, n] = a[m, k] b[k, n] (+ c[m, n]) (+ bias[n])`, all row-major, sums in f32; or its
/// `gelu_tanh`. With scales the operands are FP8 codes, of which `b` is transposed and `a` is not,
/// `k` and `n` are multiples of 16, there is no gelu, and a bias is bf16.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct GemmCall {
    /// Rows of the result; not 0.
    pub m: usize,
    /// Columns of the result; not 0.
    pub n: usize,
    /// Contracted size; not 0.
    pub k: usize,
    /// First operand.
    pub a: Matrix,
    /// Second operand.
    pub b: Matrix,
    /// What codes are multiplied by; of codes only.
    pub scales: Option<Scales>,
    /// Added to the product, of the result's type; it may be the result's own memory.
    pub c: Option<Pointer>,
    /// Added to every row, of the result's type.
    pub bias: Option<Pointer>,
    /// Where the sum goes, in the result's type, if the result is the `gelu_tanh` of the unrounded sum.
    /// Then all are bf16, rows in memory are multiples of 8 elements, and there is no `c`.
    pub gelu: Option<Pointer>,
    /// The result.
    pub out: Pointer,
    /// Its element type.
    pub out_dtype: DType,
}

/// An operand of a GEMM.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Matrix {
    /// Where.
    pub at: Pointer,
    /// Element type.
    pub dtype: DType,
    /// Stored as `[k, m]` (first operand) or `[n, k]` (second).
    pub transposed: bool,
}

/// What the codes of a [`GemmCall`] are multiplied by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Scales {
    /// Those of the first operand.
    pub a: Scale,
    /// Those of the second.
    pub b: Scale,
    /// Sums may be kept in fewer bits than f32 has; of [`ScaleOf::Tensor`] only.
    pub fast: bool,
}

/// Factors of an operand, f32.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Scale {
    /// Where.
    pub at: Pointer,
    /// How many.
    pub of: ScaleOf,
}

/// What has a factor of its own, in an operand stored as `[rows, k]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ScaleOf {
    /// All of it.
    Tensor,
    /// 128 neighbours of a row: `[k / 128, rows]`, whose rows are multiples of 4.
    Row,
    /// 128 rows of 128 neighbours: `[rows / 128, k / 128]`, the latter rounded up to a multiple of 4.
    Block,
}

/// Attention of `q[batch, s, heads, d]`, `k, v[batch, t, kv_heads, d]`, or its gradient.
#[derive(Debug, Clone, PartialEq)]
pub struct AttentionCall {
    /// Sizes and options, which decide about a library's plan.
    pub shape: AttentionShape,
    /// Operands: `q k v`, then for the gradient `o lse do`. `lse` is f32 `[batch, s, heads]`.
    pub args: SmallVec<[Pointer; 6]>,
    /// Results: `o lse`, or `dq dk dv`.
    pub results: SmallVec<[Pointer; 3]>,
    /// What runs where no library takes it.
    pub fallback: Vec<Work>,
    /// What of the workspace is free for a library: from this byte on.
    pub scratch: u64,
}

/// See [`AttentionCall`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionShape {
    /// The gradient.
    pub backward: bool,
    /// Element type of `q`, `k`, `v`, `o` and their gradients.
    pub dtype: DType,
    /// Sequences.
    pub batch: usize,
    /// Queries of a sequence.
    pub s: usize,
    /// Keys of a sequence.
    pub t: usize,
    /// Query heads.
    pub heads: usize,
    /// Key-value heads; divides `heads`.
    pub kv_heads: usize,
    /// Features of a head.
    pub d: usize,
    /// Queries do not see later keys.
    pub causal: bool,
    /// Factor of the scores.
    pub scale: f32,
}

/// Without the scale, which no library's plan depends on: it is read when it runs.
impl fmt::Display for AttentionShape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let &AttentionShape { backward, dtype, batch, s, t, heads, kv_heads, d, causal, scale: _ } =
            self;
        let pass = if backward { "gradient" } else { "forward" };
        let mask = if causal { "causal" } else { "full" };
        write!(
            f,
            "{pass} {mask} {}, {batch} sequences of {s} by {t}, {heads} by {kv_heads} heads of {d}",
            dtype.name()
        )
    }
}
