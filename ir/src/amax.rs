//! `amax`: over which axes the scales of a plan's GEMMs agree, over which they vary, and why.
//!
//! Everything is read off the instructions: an operand is followed from the GEMM back to where its scale was
//! made and its codes were.
//!
//! ```text
//! %w.amax = amax %w                         %w is a parameter, so this is `w`
//! %w.amax.max = all_reduce(max) on (dp, tp)             its group
//! %w.scale, %w.scale_inv = quant_scale %w.amax.max      current scaling; axes that shard it: where it varies
//! %w.codes = quantize %w, %w.scale
//! %w.full = all_gather %w.codes                         why: over these its codes are put together
//! %y = quant_matmul %x.codes, %w.full, %x.scale_inv, %w.scale_inv
//! ```

use cranelift_entity::SecondaryMap;

use crate::graph::Name;
use crate::ops::{Copies, Op, Quantizes, ScaleFrom};
use crate::placement::AxisSet;
use crate::plan::{self, Buffer, Instruction, Plan, PlanSection};
use crate::quant::{Format, GemmRole, Role};

/// A GEMM that multiplies codes, or what they stand for where no hardware does.
#[derive(Debug, Clone, PartialEq)]
pub struct ScaledGemm {
    /// What it makes.
    pub name: Name,
    /// Which of a projection's GEMMs it is.
    pub role: GemmRole,
    /// What it multiplies.
    pub operands: [ScaledOperand; 2],
}

/// An operand of a [`ScaledGemm`].
#[derive(Debug, Clone, PartialEq)]
pub struct ScaledOperand {
    /// The tensor of which it has the codes.
    pub tensor: Name,
    /// What that is to the GEMM.
    pub role: Role,
    /// Of the codes.
    pub format: Format,
    /// How its scales are made.
    pub scaling: ScalingKind,
    /// Axes over which its amax is reduced.
    pub group: AxisSet,
    /// Axes over which it has scales of its own.
    pub varies: AxisSet,
    /// Why the group is what it is.
    pub reason: Reason,
}

/// How scales are made; parameters are those of the recipe.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum ScalingKind {
    /// From the tensor's own amax.
    Current,
    /// From earlier amaxes.
    Delayed,
    /// From the amax of each block.
    Block,
    /// From the amax of each block, below a scale from the tensor's own amax.
    NvFp4,
}

impl ScalingKind {
    /// In lower case.
    pub fn name(self) -> &'static str {
        match self {
            ScalingKind::Current => "current",
            ScalingKind::Delayed => "delayed",
            ScalingKind::Block => "block",
            ScalingKind::NvFp4 => "nvfp4",
        }
    }
}

/// Why an amax group is what it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Reason {
    /// A weight: all axes that shard it, but for those over which its `weight_mesh` lets the scale vary.
    Sharded,
    /// An activation or a gradient that is put together; each axis of the group is in one of the three.
    Gathered {
        /// Its codes are gathered over these.
        codes: AxisSet,
        /// It is gathered over these before it is quantized.
        before: AxisSet,
        /// These do not cut it into equal pieces of the dims that can be in pieces.
        uneven: AxisSet,
    },
    /// One state for all ranks.
    History,
    /// There is nothing that must agree.
    Nothing,
    /// A block is never cut.
    Blocks {
        /// Its codes are gathered over these.
        codes: AxisSet,
        /// It is gathered over these before it is quantized.
        before: AxisSet,
        /// A weight that is cut between blocks, into unequal pieces.
        rounded: bool,
    },
}

/// All FP8 GEMMs in program order: those of `prepare`, of one micro-batch and of `update`.
pub fn scaled_gemms(plan: &Plan) -> Vec<ScaledGemm> {
    let makers = Makers::of(plan);
    let compute = |it: &Instruction| match it {
        Instruction::Compute { op, args, results, .. } => makers.gemm(op, args, results[0]),
        Instruction::Collective { .. }
        | Instruction::Copy { .. }
        | Instruction::Record { .. }
        | Instruction::Wait { .. } => None,
    };
    let once = [PlanSection::Prepare, plan.last_micro_batch(), PlanSection::Update];
    plan.timeline(&once).filter_map(|it| compute(it.1)).collect()
}

/// The instruction that first makes what is in a buffer, and which of its results that is.
struct Makers<'a> {
    plan: &'a Plan,
    of: SecondaryMap<Buffer, Option<(&'a Instruction, usize)>>,
}

/// Where a value comes from.
struct Origin<'a> {
    buffer: Buffer,
    /// What made it, if an op did.
    op: Option<(&'a Op, &'a [Buffer])>,
    /// Axes over which it was put together since.
    moved: AxisSet,
    /// Axes over which it was reduced since.
    reduced: AxisSet,
    /// Its dims have been permuted since.
    transposed: bool,
}

impl<'a> Makers<'a> {
    fn of(plan: &'a Plan) -> Makers<'a> {
        let mut of: SecondaryMap<Buffer, Option<(&Instruction, usize)>> = SecondaryMap::new();
        for (_, instruction) in plan.timeline(&PlanSection::ALL) {
            for (index, result) in instruction.writes().into_iter().enumerate() {
                of[result].get_or_insert((instruction, index));
            }
        }
        Makers { plan, of }
    }

    fn gemm(&self, op: &Op, args: &[Buffer], result: Buffer) -> Option<ScaledGemm> {
        let name = self.plan.buffers[result].name.clone();
        match op {
            Op::QuantMatmul(_) => {
                let a = self.operand(args[0], Some(args[2]))?;
                let b = self.operand(args[1], Some(args[3]))?;
                let role = match (b.is_param, b.columns) {
                    (true, false) => GemmRole::Fprop,
                    (true, true) => GemmRole::Dgrad,
                    (false, _) => GemmRole::Wgrad,
                };
                Some(ScaledGemm { name, role, operands: named(role, a, b) })
            }
            Op::Matmul(op) => {
                let (a, b) = (self.operand(args[0], None)?, self.operand(args[1], None)?);
                let role = match (op.transpose_a, op.transpose_b) {
                    (true, _) => GemmRole::Wgrad,
                    (false, true) => GemmRole::Fprop,
                    (false, false) => GemmRole::Dgrad,
                };
                Some(ScaledGemm { name, role, operands: named(role, a, b) })
            }
            // Nothing else has a form for codes.
            _ => None,
        }
    }

    /// An operand and its inverse scale, if that is another; `None` if it has not been quantized.
    fn operand(&self, codes: Buffer, inverse: Option<Buffer>) -> Option<Operand> {
        let codes = self.origin(codes);
        let (op, args) = codes.op?;
        let index = self.of[codes.buffer].map_or(0, |it| it.1);
        // A step of a body may read what another makes.
        let (op, index, arg) = match op {
            Op::Fused(it) => {
                let (step, index) = it.body.maker(it.body.results()[index])?;
                (&step.op, index, args.get(usize::from(*step.inputs.first()?)))
            }
            op => (op, index, args.first()),
        };
        let buffers = &self.plan.buffers;
        let dtype = buffers[codes.buffer].ty.dtype;
        // An op that makes a tensor may make its FP8 data instead.
        let Quantizes { format, copies, scale } = match op.codes() {
            Some(_) => {
                let (format, copies) = (dtype.fp8()?, Copies::Rows);
                Quantizes { format, copies, scale: ScaleFrom::Operand }
            }
            None => op.quantizes()?,
        };
        let columns = match copies {
            Copies::Rows => false,
            Copies::Columns => true,
            // Rows come first.
            Copies::Both => index > 0,
        };
        let (x, tensor, is_param, before) = match arg.filter(|_| op.codes().is_none()) {
            None => {
                let tensor = without_suffix(&buffers[codes.buffer].name);
                (codes.buffer, tensor, false, AxisSet::EMPTY)
            }
            Some(&x) => {
                let (tensor, is_param, before) = self.tensor(x);
                (x, buffers[tensor].name.clone(), is_param, before)
            }
        };
        let blocks = match scale {
            ScaleFrom::Blocks { uneven } if dtype.is_fp8() => (codes.moved, before, uneven),
            _ => (AxisSet::EMPTY, AxisSet::EMPTY, false),
        };
        let mut data = ScaledOperand {
            tensor,
            role: Role::Input,
            format,
            scaling: ScalingKind::Block,
            group: AxisSet::EMPTY,
            varies: AxisSet::EMPTY,
            reason: Reason::Blocks { codes: blocks.0, before: blocks.1, rounded: blocks.2 },
        };
        let scale = match scale {
            ScaleFrom::BlocksBelow(amax) => {
                Some((ScalingKind::NvFp4, args[amax], Some(args[amax])))
            }
            ScaleFrom::Blocks { .. } => None,
            ScaleFrom::Operand => inverse.map(|it| self.scale(it)),
        };
        if let Some((scaling, scale, amax)) = scale {
            data.scaling = scaling;
            self.explain(&mut data, scale, amax, x, codes.moved, is_param);
        }
        Some(Operand { data, is_param, columns: columns != codes.transposed })
    }

    /// How a scale is made that is given as its inverse, where, and from which amax.
    fn scale(&self, inverse: Buffer) -> (ScalingKind, Buffer, Option<Buffer>) {
        let scale = self.origin(inverse);
        match scale.op {
            Some((Op::DelayedScale(_), args)) => {
                let update = self.origin(args[0]).op;
                let amax = update.and_then(|(_, args)| args.get(1)).copied();
                (ScalingKind::Delayed, scale.buffer, amax)
            }
            Some((_, args)) => (ScalingKind::Current, scale.buffer, args.first().copied()),
            None => (ScalingKind::Current, scale.buffer, None),
        }
    }

    /// Fills in over what a scale agrees, over what it varies, and why. `x` is what was quantized, `moved` are
    /// axes over which its codes are gathered.
    fn explain(
        &self,
        res: &mut ScaledOperand,
        scale: Buffer,
        amax: Option<Buffer>,
        x: Buffer,
        moved: AxisSet,
        is_param: bool,
    ) {
        let sharded = |it: Buffer| self.plan.buffers[it].sharding.sharded_axes();
        res.varies = sharded(scale);
        let amax = amax.map(|it| self.origin(it));
        res.group = amax.as_ref().map_or(AxisSet::EMPTY, |it| it.reduced);
        res.reason = match res.scaling {
            ScalingKind::Block => res.reason,
            ScalingKind::Delayed => Reason::History,
            ScalingKind::Current | ScalingKind::NvFp4 if res.group.is_empty() => Reason::Nothing,
            ScalingKind::Current | ScalingKind::NvFp4 if is_param => Reason::Sharded,
            ScalingKind::Current | ScalingKind::NvFp4 => {
                let of = amax.and_then(|it| it.op).and_then(|it| it.1.first()).map_or(x, |it| *it);
                let codes = res.group.intersect(moved);
                let before = res.group.minus(codes).intersect(sharded(of).minus(sharded(x)));
                Reason::Gathered { codes, before, uneven: res.group.minus(codes).minus(before) }
            }
        };
    }

    /// What was quantized, as the model calls it, whether it is a parameter, and the axes over which it was
    /// put together before.
    fn tensor(&self, x: Buffer) -> (Buffer, bool, AxisSet) {
        let mut named = x;
        let mut buffer = x;
        let mut moved = AxisSet::EMPTY;
        loop {
            if self.plan.buffers[buffer].role == plan::Role::Param {
                return (buffer, true, moved);
            }
            let origin = self.origin(buffer);
            moved = moved.union(origin.moved);
            match origin.op {
                Some((Op::Hadamard(_), args)) => {
                    buffer = args[0];
                    named = buffer;
                }
                Some((Op::Cast(_), args)) => buffer = args[0],
                _ if origin.buffer == buffer => return (named, false, moved),
                _ => buffer = origin.buffer,
            }
        }
    }

    /// Follows a value to the op that made it, past what moves, copies or permutes it.
    fn origin(&self, mut buffer: Buffer) -> Origin<'a> {
        let (mut moved, mut reduced) = (AxisSet::EMPTY, AxisSet::EMPTY);
        let mut transposed = false;
        loop {
            let op = match self.of[buffer] {
                Some((Instruction::Collective { kind, comm, parts, .. }, index)) => {
                    let axes = self.plan.comms[*comm];
                    match kind.reduce() {
                        _ if kind.is_local() => (),
                        Some(_) => reduced = reduced.union(axes),
                        None => moved = moved.union(axes),
                    }
                    buffer = parts[index].src;
                    continue;
                }
                Some((Instruction::Copy { src, .. }, _)) => {
                    buffer = *src;
                    continue;
                }
                Some((Instruction::Compute { op, args, .. }, _)) if op.permutation().is_some() => {
                    transposed = !transposed;
                    buffer = args[0];
                    continue;
                }
                Some((Instruction::Compute { op, args, .. }, _)) => Some((op, &args[..])),
                Some((Instruction::Record { .. } | Instruction::Wait { .. }, _)) | None => None,
            };
            return Origin { buffer, op, moved, reduced, transposed };
        }
    }
}

/// An operand of which it is not said yet what it is to the GEMM.
struct Operand {
    data: ScaledOperand,
    is_param: bool,
    columns: bool,
}

/// The tensor of which `codes` are, where it is not there itself: `%x` of `%x.codes`.
fn without_suffix(codes: &str) -> Name {
    let (tensor, rest) = codes.rsplit_once(".codes").unwrap_or((codes, ""));
    format!("{tensor}{rest}")
}

fn named(role: GemmRole, a: Operand, b: Operand) -> [ScaledOperand; 2] {
    let [a_role, b_role] = role.operands();
    [ScaledOperand { role: a_role, ..a.data }, ScaledOperand { role: b_role, ..b.data }]
}
