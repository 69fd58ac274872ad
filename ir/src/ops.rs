//! Every op, one file each. To add one: write the file, add one line to `define_ops!`.
//!
//! An op is a plain struct of attributes that implements [`OpDef`]. Everything else is derived:
//! spelling in text IR and `model.ron` (the attributes are RON), equality and hashing for CSE, and
//! the tests that every op gets (`tests/ops.rs`): shapes, gradients against finite differences,
//! and every legal sharding against the global reference.

mod amaxes;
mod apply;
mod body;
mod codes;
mod factors;
pub mod norm;
pub mod norm_grad;
mod pieces;
mod tensor;

use serde::{Deserialize, Serialize};
use smallvec::SmallVec;

use crate::build::{BuildError, Builder};
use crate::checkpoint::Optimizer;
use crate::graph::{Node, NodeData, Value};
use crate::quant::Format;
use crate::range::{RangeError, Ranged};
use crate::types::{DType, Shape, TensorType};

pub use activation::ActivationKind;
pub use amaxes::Amaxes;
pub use apply::{apply, bounds_of_whole, local_shape, run_reference};
pub use body::{Body, BodyError, Slot, Source, Step};
pub use codes::Codes;
pub use collective::CollectiveKind;
pub use factors::{Assignment, Conflict, Dims, Factor, Factors, Linear};
pub use glu::GluKind;
pub use matmul::Gemm;
pub use quant_matmul::Granule;
pub use quantize::Copies;
pub use rope::Llama3Scaling;
pub use round_mx::Along;
pub use tensor::{Number, Real, Tensor, View, ViewMut};

/// Types of the results of an op.
pub type Types = SmallVec<[TensorType; 2]>;

/// Why operands do not fit an op.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TypeError {
    /// Wrong number of operands.
    #[error("takes {expected} operands, not {found}")]
    Arity {
        /// What the op takes.
        expected: usize,
        /// What it got.
        found: usize,
    },
    /// An operand has the wrong number of dimensions.
    #[error("operand {operand} ({found}) must have {expected}")]
    Ndim {
        /// Which operand.
        operand: usize,
        /// Its type.
        found: TensorType,
        /// What it must have: `2 dims`, `at least 1 dim`.
        expected: &'static str,
    },
    /// Two sizes that must agree do not.
    #[error("{what}: {left} and {right} differ")]
    Sizes {
        /// What must agree.
        what: &'static str,
        /// One size.
        left: u64,
        /// The other.
        right: u64,
    },
    /// A size is not a multiple of what it must be.
    #[error("{what}: {size} is not a multiple of {of}")]
    Multiple {
        /// What must divide.
        what: &'static str,
        /// The size.
        size: u64,
        /// The divisor.
        of: u64,
    },
    /// An operand has the wrong element type.
    #[error("operand {operand} is {found}, and must be {expected}")]
    DType {
        /// Which operand.
        operand: usize,
        /// Its element type.
        found: DType,
        /// What it must be.
        expected: &'static str,
    },
    /// A step of a body does not fit.
    #[error("in `{op}`: {source}")]
    Step {
        /// The op of the step.
        op: &'static str,
        /// The reason.
        source: Box<TypeError>,
    },
    /// A result that no machine could hold.
    #[error("{found} has more than {limit}")]
    TooLarge {
        /// The type of the result.
        found: TensorType,
        /// What it exceeds; see [`TensorType::exceeds`].
        limit: &'static str,
    },
    /// A real attribute is not in its range.
    #[error(transparent)]
    Range(#[from] RangeError),
    /// An attribute makes no sense for these operands.
    #[error("{why}")]
    Attribute {
        /// What must hold.
        why: &'static str,
    },
}

macro_rules! define_ops {
    ($($module:ident :: $ty:ident = $name:literal,)*) => {
        $(pub mod $module;)*
        $(pub use $module::$ty;)*

        /// One of the ops below, with its attributes.
        #[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
        #[allow(missing_docs)]
        pub enum Op { $($ty($ty),)* }

        /// Which op, without attributes.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        #[allow(missing_docs)]
        pub enum OpKind { $($ty,)* }

        impl Op {
            /// Which op this is.
            pub fn kind(&self) -> OpKind {
                match self { $(Op::$ty(_) => OpKind::$ty,)* }
            }
            /// `matmul(transpose_b:true)`: the name, then the attributes as RON.
            pub fn to_text(&self) -> String {
                match self { $(Op::$ty(it) => to_text($name, it),)* }
            }
            /// Inverse of [`Op::to_text`].
            pub fn from_text(s: &str) -> Result<Op, String> {
                let (name, attrs) = s.split_at(s.find('(').unwrap_or(s.len()));
                match name {
                    $($name => from_text(attrs).map(Op::$ty),)*
                    _ => Err(format!("unknown op `{name}`")),
                }
            }
            /// [`OpDef::infer`], if every attribute is in its range.
            pub fn infer(&self, inputs: &[&TensorType]) -> Result<Types, TypeError> {
                self.numbers().iter().try_for_each(Ranged::check)?;
                match self { $(Op::$ty(it) => it.infer(inputs),)* }
            }
            /// [`OpDef::factors`].
            pub fn factors(&self, inputs: &[&TensorType], results: &[&TensorType]) -> Factors {
                let factors = match self { $(Op::$ty(it) => it.factors(inputs, results),)* };
                factors.contiguous(&self.bounds(inputs))
            }
            /// [`OpDef::reference`].
            pub fn reference<T: Real>(
                &self, inputs: &[View<'_, T>], results: &mut [ViewMut<'_, T>], cx: &LocalCx<'_>,
            ) {
                match self { $(Op::$ty(it) => it.reference(inputs, results, cx),)* }
            }
            /// [`OpDef::grad`], if the op has one.
            pub fn grad(&self, cx: &mut GradCx<'_, '_>) -> Result<Grads, GradError> {
                let has_gradient = |it: &&usize| cx.grads[**it].is_some();
                if let Some(&result) = self.by_products().iter().find(has_gradient) {
                    return Err(cx.not_differentiable(result));
                }
                match self {
                    it if it.is_fused() => Err(cx.not_differentiable(0)),
                    $(Op::$ty(it) => it.grad(cx),)*
                }
            }
            /// [`OpDef::batches_with`].
            pub fn batches_with(&self, other: &Op) -> bool {
                match (self, other) {
                    $((Op::$ty(a), Op::$ty(b)) => a.batches_with(b),)*
                    _ => false,
                }
            }
            /// Returns true if kernels give the numbers of the reference in f32, bit for bit, but for sums: what recipes
            /// compute besides products.
            pub fn is_exact(&self) -> bool {
                self.kind().origins().contains(&Origin::Recipe) && self.engine() == Engine::Memory
            }
            /// [`OpDef::is_fused`]; also if it gives amaxes or codes of its results.
            pub fn is_fused(&self) -> bool {
                self.amaxes().is_some_and(|it| !it.is_none())
                    || self.codes().is_some_and(|it| !it.is_none())
                    || match self { $(Op::$ty(it) => it.is_fused(),)* }
            }
        }

        /// Gives `Op` a method of [`OpDef`].
        macro_rules! forward {
            (fn $method:ident $params:tt -> $result:ty = $this:ident $args:tt) => {
                impl Op {
                    #[doc = concat!("[`OpDef::", stringify!($method), "`].")]
                    pub fn $method $params -> $result {
                        match $this { $(Op::$ty(it) => it.$method $args,)* }
                    }
                }
            };
        }

        impl OpKind {
            /// Every op, in the order of the list.
            pub const ALL: &[OpKind] = &[$(OpKind::$ty,)*];
            /// The spelling in text IR.
            pub fn name(self) -> &'static str {
                match self { $(OpKind::$ty => $name,)* }
            }
            /// [`OpDef::ORIGINS`].
            pub fn origins(self) -> &'static [Origin] {
                match self { $(OpKind::$ty => $ty::ORIGINS,)* }
            }
            /// [`OpDef::samples`].
            pub fn samples(self) -> Vec<Sample> {
                match self { $(OpKind::$ty => $ty::samples(),)* }
            }
        }

        $(impl From<$ty> for Op { fn from(it: $ty) -> Op { Op::$ty(it) } })*
    };
}

define_ops! {
    activation::Activation = "activation",
    activation_grad::ActivationGrad = "activation_grad",
    adam::Adam = "adam",
    adamw::AdamW = "adamw",
    add::Add = "add",
    amax::Amax = "amax",
    attention::Attention = "attention",
    attention_grad::AttentionGrad = "attention_grad",
    bias_add::BiasAdd = "bias_add",
    cast::Cast = "cast",
    ce_loss::CeLoss = "ce_loss",
    ce_loss_grad::CeLossGrad = "ce_loss_grad",
    ce_max::CeMax = "ce_max",
    ce_stats::CeStats = "ce_stats",
    ce_stats_grad::CeStatsGrad = "ce_stats_grad",
    clip_scale::ClipScale = "clip_scale",
    collective::Collective = "collective",
    concat::Concat = "concat",
    cross_entropy::CrossEntropy = "cross_entropy",
    delayed_scale::DelayedScale = "delayed_scale",
    delayed_update::DelayedUpdate = "delayed_update",
    div::Div = "div",
    dropout::Dropout = "dropout",
    embedding::Embedding = "embedding",
    embedding_grad::EmbeddingGrad = "embedding_grad",
    fill::Fill = "fill",
    fused::Fused = "fused",
    glu::Glu = "glu",
    glu_grad::GluGrad = "glu_grad",
    hadamard::Hadamard = "hadamard",
    layer_norm::LayerNorm = "layer_norm",
    layer_norm_grad::LayerNormGrad = "layer_norm_grad",
    matmul::Matmul = "matmul",
    merge_dims::MergeDims = "merge_dims",
    mul::Mul = "mul",
    pad_dim::PadDim = "pad_dim",
    quant_matmul::QuantMatmul = "quant_matmul",
    quant_scale::QuantScale = "quant_scale",
    quantize::Quantize = "quantize",
    quantize_block::QuantizeBlock = "quantize_block",
    reshard::Reshard = "reshard",
    rms_norm::RmsNorm = "rms_norm",
    rms_norm_grad::RmsNormGrad = "rms_norm_grad",
    rope::Rope = "rope",
    round_mx::RoundMx = "round_mx",
    round_nvfp4::RoundNvFp4 = "round_nvfp4",
    scale::Scale = "scale",
    sgd::Sgd = "sgd",
    slice_dim::SliceDim = "slice_dim",
    split_dim::SplitDim = "split_dim",
    sum_leading::SumLeading = "sum_leading",
    sum_squares::SumSquares = "sum_squares",
    transpose::Transpose = "transpose",
    watch::Watch = "watch",
    zeros_like::ZerosLike = "zeros_like",
}

forward! { fn numbers(&self) -> Numbers = self() }
forward! { fn by_products(&self) -> &'static [usize] = self() }
forward! { fn constants(&self) -> &'static [usize] = self() }
forward! { fn bounds(&self, inputs: &[&TensorType]) -> Bounds = self(inputs) }
forward! { fn in_place(&self) -> &[(usize, usize)] = self() }
forward! { fn is_map(&self) -> bool = self() }
forward! { fn without(&self, operand: usize) -> Option<Op> = self(operand) }
forward! { fn localize(&self, results: &[&[u64]]) -> Option<Op> = self(results) }
forward! { fn stands_for(&self, inputs: &[&TensorType]) -> StandsFor = self(inputs) }
forward! { fn flops(&self, inputs: &[&[u64]], results: &[&[u64]]) -> u64 = self(inputs, results) }
forward! { fn model_flops(&self, inputs: &[&[u64]], results: &[&[u64]]) -> u64 = self(inputs, results) }
forward! { fn engine(&self) -> Engine = self() }
forward! { fn bytes(&self, inputs: &[TensorType], results: &[TensorType]) -> u64 = self(inputs, results) }
forward! { fn is_view(&self) -> bool = self() }
forward! { fn looks_up(&self, inputs: &[&TensorType]) -> Option<LookUp> = self(inputs) }
forward! { fn is_zero(&self) -> bool = self() }
forward! { fn casts_to(&self) -> Option<DType> = self() }
forward! { fn rounds_inside(&self) -> bool = self() }
forward! { fn is_form(&self) -> bool = self() }
forward! { fn permutation(&self) -> Option<&[usize]> = self() }
forward! { fn is_sum(&self) -> bool = self() }
forward! { fn quantizes(&self) -> Option<Quantizes> = self() }
forward! { fn history(&self) -> Option<usize> = self() }
forward! { fn trains(&self) -> Option<Trains> = self() }
forward! { fn first_gradients(&self) -> &[usize] = self() }

/// What it means to be an op. A newcomer reads this trait and one neighbour.
pub trait OpDef: Sized + Into<Op> {
    /// The origins of the op in a program. Default: a model.
    const ORIGINS: &'static [Origin] = &[Origin::Model];

    /// Result types, or why the operands do not fit.
    fn infer(&self, inputs: &[&TensorType]) -> Result<Types, TypeError>;

    /// The real attributes, each with the range that it must be in. Default: there are none.
    fn numbers(&self) -> Numbers {
        Numbers::new()
    }

    /// Which dimensions correspond, and what sharding each may have. Operands are well-typed.
    fn factors(&self, inputs: &[&TensorType], results: &[&TensorType]) -> Factors;

    /// The living definition of the op: one rank's operands in, one rank's results out, slow and
    /// obvious. Shapes are local and `results` already have theirs; every element is written,
    /// padding (rows beyond a bound's extent) with zero. Integers are carried in `T` exactly
    /// (below 2^24). Arithmetic is in `T` whatever the dtypes; the caller rounds on store.
    fn reference<T: Real>(
        &self,
        inputs: &[View<'_, T>],
        results: &mut [ViewMut<'_, T>],
        cx: &LocalCx<'_>,
    );

    /// Gradients of the operands, built from other ops, on global tensors.
    fn grad(&self, cx: &mut GradCx<'_, '_>) -> Result<Grads, GradError> {
        Err(cx.not_differentiable(0))
    }

    /// Results without a gradient: only the op's own gradient reads them, or the loss does not depend on them.
    fn by_products(&self) -> &'static [usize] {
        &[]
    }

    /// Operands that the gradient takes as constants, because the loss does not depend on them.
    fn constants(&self) -> &'static [usize] {
        &[]
    }

    /// Returns true if only fusion makes the op, which comes after gradients. It then has none.
    fn is_fused(&self) -> bool {
        false
    }

    /// Dimensions of which the reference must know where the shard starts and how long it is.
    /// Such a dimension may only be sharded contiguously.
    fn bounds(&self, _inputs: &[&TensorType]) -> Bounds {
        Bounds::new()
    }

    /// `(result, operand)` pairs that may share one buffer.
    fn in_place(&self) -> &[(usize, usize)] {
        &[]
    }

    /// Returns true if each element of each result follows from the elements of operands at its place, and all
    /// have one shape.
    fn is_map(&self) -> bool {
        false
    }

    /// Returns the op for the other operands, if this op only adds this operand to their result. Returns
    /// `None` if it does more with it.
    fn without(&self, _operand: usize) -> Option<Op> {
        None
    }

    /// The op that one rank runs, where attributes mention sizes of results: these are the local
    /// ones. Default: they do not.
    fn localize(&self, _results: &[&[u64]]) -> Option<Op> {
        None
    }

    /// The meaning of the results at the level of the model, where users name ops. Default: that of the op's own name.
    fn stands_for(&self, _inputs: &[&TensorType]) -> StandsFor {
        StandsFor::Itself
    }

    /// Floating point operations on operands and results of these (local) shapes; a multiply-add
    /// counts two. Zero for what is bound by memory.
    fn flops(&self, _inputs: &[&[u64]], _results: &[&[u64]]) -> u64 {
        0
    }

    /// Floating point operations as model FLOPs utilization (MFU) counts them: causal attention is not halved,
    /// and a backward pass counts only the products that make gradients, not those that it recomputes.
    fn model_flops(&self, inputs: &[&[u64]], results: &[&[u64]]) -> u64 {
        self.flops(inputs, results)
    }

    /// Indices of results that are gradients of the loss although no operand is a gradient. The backward pass
    /// starts with them.
    fn first_gradients(&self) -> &[usize] {
        &[]
    }

    /// Returns true if calls of both may be one launch over many tensors. Attributes may differ in what a table has for
    /// each tensor.
    fn batches_with(&self, _other: &Self) -> bool {
        false
    }

    /// The unit of a GPU that does the work. Default: it moves memory.
    fn engine(&self) -> Engine {
        Engine::Memory
    }

    /// Bytes that one rank moves, on types with local shapes. Default: all operands and results.
    fn bytes(&self, inputs: &[TensorType], results: &[TensorType]) -> u64 {
        bytes_of(inputs) + bytes_of(results)
    }

    /// Returns true if the result is the memory of the operand under another shape.
    fn is_view(&self) -> bool {
        false
    }

    /// The ids that the op looks up, if it does. An op that gets them from such an op says nothing.
    fn looks_up(&self, _inputs: &[&TensorType]) -> Option<LookUp> {
        None
    }

    /// Returns true if every result is zero, whatever the operands hold. Of those, only the shape counts.
    fn is_zero(&self) -> bool {
        false
    }

    /// The element type that the op gives to its first operand, whatever that has.
    fn casts_to(&self) -> Option<DType> {
        None
    }

    /// Returns true if kernels round a value on the way to the type of an operand, which the reference does not.
    fn rounds_inside(&self) -> bool {
        false
    }

    /// Returns true if each result is the first operand in another form: permuted, rotated, rounded, or in another type.
    fn is_form(&self) -> bool {
        false
    }

    /// The dimension of the operand that each dimension of the result is, if that is all that the op changes.
    fn permutation(&self) -> Option<&[usize]> {
        None
    }

    /// Returns true if the result is the sum of the operands, perhaps scaled or in another type. A gradient comes to its
    /// parameter this way, which takes next to no time.
    fn is_sum(&self) -> bool {
        false
    }

    /// How the op quantizes its first operand, if that is all it does.
    fn quantizes(&self) -> Option<Quantizes> {
        None
    }

    /// The operand that is an amax, if the op takes one into a history.
    fn history(&self) -> Option<usize> {
        None
    }

    /// The optimizer, if the op is one step of it.
    fn trains(&self) -> Option<Trains> {
        None
    }

    /// A few well-typed operand lists, for the tests that every op gets.
    fn samples() -> Vec<Sample>;
}

/// The unit of a GPU that does an op's work; see [`OpDef::engine`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Engine {
    /// Memory: the op takes as long as its bytes.
    Memory,
    /// Tensor cores, in a GEMM of floats. The last dim of the first result has its columns.
    Gemm,
    /// Tensor cores, in a GEMM of FP8 data.
    Fp8Gemm {
        /// How its operands are scaled.
        scales: Fp8Scales,
        /// Sums stay in the tensor cores' precision.
        fast: bool,
    },
    /// Tensor cores, in attention.
    Attention,
}

/// How the operands of a GEMM on FP8 data are scaled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fp8Scales {
    /// By tensor, or by piece of it.
    Tensor,
    /// Both by row.
    Row,
    /// At least one by square block.
    Block,
}

/// FP8 or FP4 data, or what it stands for, that an op makes; see [`OpDef::quantizes`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Quantizes {
    /// The format of the data.
    pub format: Format,
    /// The copies that the op makes, rows first.
    pub copies: Copies,
    /// The origin of the scale.
    pub scale: ScaleFrom,
}

/// The origin of the scale of quantized data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ScaleFrom {
    /// An operand.
    Operand,
    /// The amax of each block.
    Blocks {
        /// Ranks may hold unequal numbers of blocks.
        uneven: bool,
    },
    /// The amax of each block, below a scale from the amax of the tensor, which is this operand.
    BlocksBelow(usize),
}

/// Ids that an op looks up; see [`OpDef::looks_up`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LookUp {
    /// The operand that holds them.
    pub ids: usize,
    /// The operand in which they are positions.
    pub table: usize,
    /// The number of ids that the table has.
    pub size: u64,
}

/// Bytes of tensors of these types.
pub fn bytes_of(types: &[TensorType]) -> u64 {
    types.iter().map(TensorType::bytes).sum()
}

/// An optimizer's op. Operands: the parameter, its states, the gradient, and three scalars: the factor of gradients,
/// the learning rate, and whether the update is applied. Results: the new parameter and the new states.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Trains {
    /// The optimizer and its numbers.
    pub optimizer: Optimizer,
    /// PyTorch's names of the states.
    pub states: &'static [&'static str],
}

impl Trains {
    /// The number of scalars behind the gradient.
    pub const SCALARS: usize = 3;

    /// The operand that is the gradient.
    pub fn grad(&self) -> usize {
        1 + self.states.len()
    }
}

/// Real attributes of an op; see [`OpDef::numbers`].
pub type Numbers = SmallVec<[Ranged; 4]>;

/// A part of planc, or the model, that puts an op into a program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Origin {
    /// A model has it in its forward pass.
    Model,
    /// It is the gradient of another op.
    Gradient,
    /// A recipe asks for it: amaxes, scales, FP8 data, and GEMMs on FP8 data.
    Recipe,
    /// The update of a step trains weights with it.
    Update,
    /// Placements ask for it: it moves data between ranks.
    Placement,
}

/// The op of the model that an op's results belong to. Recipes and fusion make ops that no model has. A model
/// that lists `matmul` in a checkpointing policy covers the GEMMs made from it, too.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StandsFor {
    /// The results of the op that has this name.
    Itself,
    /// The results of another op: a GEMM on FP8 data is a `matmul`.
    Op(OpKind),
    /// Operand 0 in another form, such as its FP8 data, or with a bias added.
    Operand,
    /// A few numbers about a tensor: its amax, its scale.
    Scale,
}

/// Dimensions of which an op knows the bounds; see [`OpDef::bounds`].
pub type Bounds = SmallVec<[BoundAt; 4]>;

/// A dimension of an operand or a result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BoundAt {
    /// Dimension `.1` of operand `.0`.
    Input(usize, usize),
    /// Dimension `.1` of result `.0`.
    Result(usize, usize),
}

/// What [`OpDef::reference`] may know about its rank.
#[derive(Debug, Clone, Copy)]
pub struct LocalCx<'a> {
    /// One entry for each of [`OpDef::bounds`].
    pub bounds: &'a [LocalBound],
}

/// One rank's part of a dimension, resolved by `runtime::bind`: rows `start .. start + extent`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LocalBound {
    /// First global index held here.
    pub start: u64,
    /// Number of valid rows held here; what the buffer has beyond them is padding.
    pub extent: u64,
    /// Global size of the dimension.
    pub size: u64,
}

impl LocalBound {
    /// Local position of a global index; `None` where another rank, or none, holds it.
    pub fn local(self, index: i64) -> Option<usize> {
        let offset = u64::try_from(index).ok()?.checked_sub(self.start)?;
        (offset < self.extent).then_some(offset as usize)
    }
}

/// Gradient of each operand; `None` where none is needed or the operand has none (ids).
pub type Grads = SmallVec<[Option<Value>; 3]>;

/// Why a gradient cannot be taken.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum GradError {
    /// The op has no gradient.
    #[error("`{name}`: `{op}` has no gradient, and a trained parameter needs one through it")]
    NotDifferentiable {
        /// Result of the op.
        name: String,
        /// The op.
        op: String,
    },
    /// A part of the cross entropy, whose gradient leaves out that of the largest logit.
    #[error(
        "`{name}` depends on `{max}`, the largest logit, in whose gradient there is only a part of the \
         cross entropy: a `ce_loss` of `{max}` must be all that reads it"
    )]
    ShiftStays {
        /// Result of the op.
        name: String,
        /// The operand that is left out.
        max: String,
    },
    /// The gradient's ops do not fit together: a bug in the op.
    #[error(transparent)]
    Build(#[from] BuildError),
}

/// What [`OpDef::grad`] works with.
pub struct GradCx<'a, 'b> {
    /// Where to put the gradient's nodes.
    pub builder: &'a mut Builder<'b>,
    /// The node to differentiate.
    pub node: Node,
    /// Its operands.
    pub inputs: SmallVec<[Value; 4]>,
    /// Its results.
    pub results: SmallVec<[Value; 2]>,
    /// Gradient of each result; `None` is zero. At least one is there.
    pub grads: SmallVec<[Option<Value>; 2]>,
    /// Which operands need a gradient.
    pub wanted: SmallVec<[bool; 4]>,
}

impl GradCx<'_, '_> {
    /// Name of the node's first result.
    pub fn name(&self) -> &str {
        &self.builder.graph.values[self.results[0]].name
    }

    /// The error of an op that has no gradient through this result.
    pub fn not_differentiable(&self, result: usize) -> GradError {
        let graph = &self.builder.graph;
        let name = graph.values[self.results[result]].name.clone();
        GradError::NotDifferentiable { name, op: graph.nodes[self.node].op.to_text() }
    }

    /// The error of a part of the cross entropy whose operand `max` cannot be taken as a constant.
    pub fn shift_stays(&self, max: usize) -> GradError {
        let max = self.builder.graph.values[self.inputs[max]].name.clone();
        GradError::ShiftStays { name: self.name().to_string(), max }
    }

    /// The node that makes a value; `None` for a leaf.
    pub fn producer(&self, value: Value) -> Option<&NodeData> {
        let graph = &self.builder.graph;
        graph.producer(value).map(|it| &graph.nodes[it])
    }

    /// Type of a value.
    pub fn ty(&self, value: Value) -> TensorType {
        self.builder.graph.ty(value).clone()
    }

    /// Gradient of result `index`, where the op cannot do without.
    ///
    /// # Panics
    /// If only other results have a gradient; use [`GradCx::grads`] for such ops.
    pub fn grad(&self, index: usize) -> Value {
        self.grads[index].unwrap_or_else(|| panic!("`{}` has no gradient", self.name()))
    }

    /// Gradient of result `index`, zeros where it has none.
    pub fn grad_or_zero(&mut self, index: usize) -> Result<Value, GradError> {
        let result = self.results[index];
        if let Some(grad) = self.grads[index] {
            return Ok(grad);
        }
        let name = format!("{}.grad", self.builder.graph.values[result].name);
        let zeros = Fill::new(0.0, self.builder.graph.ty(result));
        let res = self.builder.op(&name, zeros, &[])?;
        self.builder.graph.values[res].like = Some(result);
        Ok(res)
    }

    /// Name for the gradient of operand `index`.
    pub fn grad_name(&self, index: usize) -> String {
        format!("{}.grad", self.builder.graph.values[self.inputs[index]].name)
    }

    /// Applies a one-result op that makes the gradient of operand `index`.
    pub fn op(
        &mut self,
        index: usize,
        op: impl Into<Op>,
        inputs: &[Value],
    ) -> Result<Option<Value>, GradError> {
        let name = self.grad_name(index);
        Ok(Some(self.builder.op(&name, op, inputs)?))
    }

    /// Applies an op whose results are the gradients of the operands `indices`.
    pub fn ops(
        &mut self,
        indices: &[usize],
        op: impl Into<Op>,
        inputs: &[Value],
    ) -> Result<SmallVec<[Value; 2]>, GradError> {
        let names: Vec<String> = indices.iter().map(|&it| self.grad_name(it)).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        Ok(self.builder.ops(&names, op, inputs)?)
    }
}

/// One well-typed use of an op.
#[derive(Debug, Clone)]
pub struct Sample {
    /// The op.
    pub op: Op,
    /// Its operands.
    pub inputs: Vec<SampleInput>,
}

/// One operand of a [`Sample`].
#[derive(Debug, Clone)]
pub struct SampleInput {
    /// Its type.
    pub ty: TensorType,
    /// Its values.
    pub values: Values,
}

/// Values of a sample operand.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Values {
    /// Uniform on [-1, 1).
    Random,
    /// Uniform on [0.5, 1.5): for what is a root, a norm, a count.
    Positive,
    /// 1, as a condition that holds.
    One,
    /// 0, as a condition that does not hold.
    Zero,
    /// Integers of `0..n`.
    Ids(u32),
}

impl Sample {
    /// A sample whose operands are random floats of these shapes.
    pub fn floats(op: impl Into<Op>, shapes: &[&[u64]]) -> Sample {
        let input = |shape: &&[u64]| SampleInput {
            ty: TensorType::new(DType::F32, shape),
            values: Values::Random,
        };
        Sample { op: op.into(), inputs: shapes.iter().map(input).collect() }
    }

    /// Replaces the values of operand `index`; ids become `i32`.
    pub fn fill(mut self, index: usize, values: Values) -> Sample {
        if let Values::Ids(_) = values {
            self.inputs[index].ty.dtype = DType::I32;
        }
        self.inputs[index].values = values;
        self
    }

    /// The sample in bf16, but for operands that the op takes in f32 alone; `None` if those are all.
    pub fn in_bf16(&self) -> Option<Sample> {
        let mut res = self.clone();
        let floats = res.inputs.iter_mut().filter(|it| it.ty.dtype == DType::F32);
        floats.for_each(|it| it.ty.dtype = DType::Bf16);
        loop {
            let types: Vec<&TensorType> = res.inputs.iter().map(|it| &it.ty).collect();
            let dtype = |it: &SampleInput| it.ty.dtype;
            match res.op.infer(&types) {
                Err(TypeError::DType { operand, .. })
                    if res.inputs[operand].ty.dtype == DType::Bf16 =>
                {
                    res.inputs[operand].ty.dtype = DType::F32;
                }
                Err(_) => return None,
                Ok(_) => {
                    let changed = !res.inputs.iter().map(dtype).eq(self.inputs.iter().map(dtype));
                    return changed.then_some(res);
                }
            }
        }
    }
}

/// Checks the number of operands.
pub(crate) fn arity(inputs: &[&TensorType], expected: usize) -> Result<(), TypeError> {
    match inputs.len() == expected {
        true => Ok(()),
        false => Err(TypeError::Arity { expected, found: inputs.len() }),
    }
}

/// Checks that operand `operand` has `n` dimensions.
pub(crate) fn ndim(
    inputs: &[&TensorType],
    operand: usize,
    n: usize,
    expected: &'static str,
) -> Result<(), TypeError> {
    let found = inputs[operand];
    match found.ndim() == n {
        true => Ok(()),
        false => Err(TypeError::Ndim { operand, found: found.clone(), expected }),
    }
}

/// Checks that operand `operand` has at least `n` dimensions.
pub(crate) fn ndim_at_least(
    inputs: &[&TensorType],
    operand: usize,
    n: usize,
    expected: &'static str,
) -> Result<(), TypeError> {
    let found = inputs[operand];
    match found.ndim() >= n {
        true => Ok(()),
        false => Err(TypeError::Ndim { operand, found: found.clone(), expected }),
    }
}

/// Checks that operand `operand` holds integers.
pub(crate) fn integers(inputs: &[&TensorType], operand: usize) -> Result<(), TypeError> {
    let found = inputs[operand].dtype;
    match found {
        DType::I32 => Ok(()),
        _ => Err(TypeError::DType { operand, found, expected: "an integer type" }),
    }
}

/// Checks that operand `operand` holds real numbers.
pub(crate) fn floats(inputs: &[&TensorType], operand: usize) -> Result<(), TypeError> {
    let found = inputs[operand].dtype;
    match found.is_float() {
        true => Ok(()),
        false => Err(TypeError::DType { operand, found, expected: "a float type" }),
    }
}

/// Checks that operand `operand` is a single number.
pub(crate) fn scalar(inputs: &[&TensorType], operand: usize) -> Result<(), TypeError> {
    ndim(inputs, operand, 0, "no dims: it is one number")
}

/// Checks that operand `operand` is a single number, and f32.
pub(crate) fn number(inputs: &[&TensorType], operand: usize) -> Result<(), TypeError> {
    scalar(inputs, operand)?;
    single(inputs, operand)
}

/// Checks that operand `operand` is f32.
pub(crate) fn single(inputs: &[&TensorType], operand: usize) -> Result<(), TypeError> {
    match inputs[operand].dtype {
        DType::F32 => Ok(()),
        found => Err(TypeError::DType { operand, found, expected: "f32" }),
    }
}

/// Checks that two operands have one shape and element type.
pub(crate) fn same_type(inputs: &[&TensorType], operand: usize) -> Result<(), TypeError> {
    same_shape(inputs[0], inputs[operand])?;
    let found = inputs[operand].dtype;
    match found == inputs[0].dtype {
        true => Ok(()),
        false => Err(TypeError::DType { operand, found, expected: "that of operand 0" }),
    }
}

/// Checks that operand `operand` has the type of operand `of`.
pub(crate) fn type_of(inputs: &[&TensorType], operand: usize, of: usize) -> Result<(), TypeError> {
    same_shape(inputs[of], inputs[operand])?;
    let found = inputs[operand].dtype;
    match found == inputs[of].dtype {
        true => Ok(()),
        false => Err(TypeError::DType { operand, found, expected: "that of `x`" }),
    }
}

/// Checks that `operand` has the shape of the leading dimensions of `of`.
pub(crate) fn per_row(of: &TensorType, operand: &TensorType) -> Result<(), TypeError> {
    same_size("numbers of rows' dims", of.ndim() as u64 - 1, operand.ndim() as u64)?;
    for (&a, &b) in of.shape.iter().zip(&operand.shape) {
        same_size("sizes of one dim", a, b)?;
    }
    Ok(())
}

/// Checks that two sizes agree.
pub(crate) fn same_size(what: &'static str, left: u64, right: u64) -> Result<(), TypeError> {
    match left == right {
        true => Ok(()),
        false => Err(TypeError::Sizes { what, left, right }),
    }
}

/// Checks that operands have one shape.
pub(crate) fn same_shape(left: &TensorType, right: &TensorType) -> Result<(), TypeError> {
    same_size("numbers of dims", left.ndim() as u64, right.ndim() as u64)?;
    for (&a, &b) in left.shape.iter().zip(&right.shape) {
        same_size("sizes of one dim", a, b)?;
    }
    Ok(())
}

fn to_text(name: &str, attrs: &impl Serialize) -> String {
    let attrs = ron::to_string(attrs).expect("op attributes serialize");
    if attrs == "()" { name.to_string() } else { format!("{name}{attrs}") }
}

fn from_text<T: for<'a> Deserialize<'a>>(attrs: &str) -> Result<T, String> {
    ron::from_str(if attrs.is_empty() { "()" } else { attrs }).map_err(|it| it.to_string())
}

/// Serde helper: attributes equal to their default are not printed.
pub(crate) fn is_default<T: Default + PartialEq>(it: &T) -> bool {
    *it == T::default()
}

/// Shape without its last dimension.
pub(crate) fn leading(shape: &[u64]) -> Shape {
    Shape::from_slice(&shape[..shape.len() - 1])
}
