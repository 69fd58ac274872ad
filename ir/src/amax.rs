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

use crate::DType;
use crate::graph::Name;
use crate::ops::{Granule, Op, QuantMatmul};
use crate::placement::AxisSet;
use crate::plan::{self, Buffer, Instruction, Plan, PlanSection};
use crate::quant::{GemmRole, Role};

/// A GEMM that multiplies codes.
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
    /// Element type of the codes.
    pub dtype: DType,
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
}

impl ScalingKind {
    /// In lower case.
    pub fn name(self) -> &'static str {
        match self {
            ScalingKind::Current => "current",
            ScalingKind::Delayed => "delayed",
            ScalingKind::Block => "block",
        }
    }
}

/// Why an amax group is what it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Reason {
    /// A weight: all axes that shard it and that its `weight_mesh` does not leave out.
    Sharded,
    /// An activation or a gradient: the axes over which its codes are gathered; over others it cannot be cut
    /// into equal pieces.
    Gathered {
        /// Those in the group.
        over: AxisSet,
        /// The others in the group.
        uneven: AxisSet,
    },
    /// One state for all ranks.
    History,
    /// There is nothing that must agree.
    Nothing,
    /// A block is never cut.
    Blocks,
}

/// All GEMMs on codes, in program order.
pub fn scaled_gemms(plan: &Plan) -> Vec<ScaledGemm> {
    let makers = Makers::of(plan);
    let gemm = |it: &Instruction| match it {
        Instruction::Compute { op: Op::QuantMatmul(op), args, results, .. } => {
            Some(makers.gemm(op, args, results[0]))
        }
        Instruction::Compute { .. }
        | Instruction::Collective { .. }
        | Instruction::Copy { .. }
        | Instruction::Record { .. }
        | Instruction::Wait { .. } => None,
    };
    plan.timeline(&PlanSection::ALL).filter_map(|it| gemm(it.1)).collect()
}

/// The instruction that first makes what is in a buffer.
struct Makers<'a> {
    plan: &'a Plan,
    of: SecondaryMap<Buffer, Option<&'a Instruction>>,
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
        let mut of: SecondaryMap<Buffer, Option<&Instruction>> = SecondaryMap::new();
        for (_, instruction) in plan.timeline(&PlanSection::ALL) {
            for result in instruction.writes() {
                of[result].get_or_insert(instruction);
            }
        }
        Makers { plan, of }
    }

    fn gemm(&self, op: &QuantMatmul, args: &[Buffer], result: Buffer) -> ScaledGemm {
        let (a, b) = (self.operand(&op.a, args[0], args[2]), self.operand(&op.b, args[1], args[3]));
        let role = match (b.is_param, b.columns) {
            (true, false) => GemmRole::Fprop,
            (true, true) => GemmRole::Dgrad,
            (false, _) => GemmRole::Wgrad,
        };
        let [a_role, b_role] = role.operands();
        let operands = [a.named(a_role), b.named(b_role)];
        ScaledGemm { name: self.plan.buffers[result].name.clone(), role, operands }
    }

    fn operand(&self, granule: &Granule, codes: Buffer, scale: Buffer) -> Operand {
        let buffers = &self.plan.buffers;
        let dtype = buffers[codes].ty.dtype;
        let codes = self.origin(codes);
        let columns_made = match codes.op {
            Some((Op::Quantize(op), _)) => {
                let n_results = usize::from(op.copies.rows()) + usize::from(op.copies.columns());
                let results = self.of[codes.buffer].map(Instruction::writes).unwrap_or_default();
                let last = results.get(n_results - 1) == Some(&codes.buffer);
                op.copies.columns() && last
            }
            _ => false,
        };
        let tensor = codes.op.and_then(|it| it.1.first()).map_or(codes.buffer, |it| *it);
        let source = self.cast_from(tensor);
        let is_param = buffers[source].role == plan::Role::Param;
        let tensor = buffers[if is_param { source } else { tensor }].name.clone();
        let columns = columns_made != codes.transposed;
        let mut res = ScaledOperand {
            tensor,
            role: Role::Input,
            dtype,
            scaling: ScalingKind::Block,
            group: AxisSet::EMPTY,
            varies: AxisSet::EMPTY,
            reason: Reason::Blocks,
        };
        if let Granule::Tensor(_) = granule {
            self.scale(&mut res, scale, codes.moved, is_param);
        }
        Operand { data: res, is_param, columns }
    }

    /// Fills in what is to be said of the scale of a tensor, given as its inverse.
    fn scale(&self, res: &mut ScaledOperand, inverse: Buffer, moved: AxisSet, is_param: bool) {
        let scale = self.origin(inverse);
        res.varies = self.plan.buffers[scale.buffer].sharding.sharded_axes();
        let amax = match scale.op {
            Some((Op::DelayedScale(_), args)) => {
                res.scaling = ScalingKind::Delayed;
                let update = self.origin(args[0]);
                update.op.and_then(|(_, args)| args.get(1)).map(|&it| self.origin(it))
            }
            Some((_, args)) => {
                res.scaling = ScalingKind::Current;
                args.first().map(|&it| self.origin(it))
            }
            None => None,
        };
        res.group = amax.map_or(AxisSet::EMPTY, |it| it.reduced);
        let (over, uneven) = (res.group.intersect(moved), res.group.minus(moved));
        res.reason = match res.scaling {
            ScalingKind::Delayed => Reason::History,
            ScalingKind::Block => Reason::Blocks,
            ScalingKind::Current if res.group.is_empty() => Reason::Nothing,
            ScalingKind::Current if is_param => Reason::Sharded,
            ScalingKind::Current => Reason::Gathered { over, uneven },
        };
    }

    /// Follows a value to the op that made it, past what moves, copies or permutes it.
    fn origin(&self, mut buffer: Buffer) -> Origin<'a> {
        let (mut moved, mut reduced) = (AxisSet::EMPTY, AxisSet::EMPTY);
        let mut transposed = false;
        loop {
            let op = match self.of[buffer] {
                Some(Instruction::Collective { kind, comm, parts, .. }) => {
                    let part = parts.iter().find(|it| it.dst == buffer).expect("it makes it");
                    let axes = self.plan.comms[*comm];
                    match kind.reduce() {
                        _ if kind.is_local() => (),
                        Some(_) => reduced = reduced.union(axes),
                        None => moved = moved.union(axes),
                    }
                    buffer = part.src;
                    continue;
                }
                Some(Instruction::Copy { src, .. }) => {
                    buffer = *src;
                    continue;
                }
                Some(Instruction::Compute { op: Op::Transpose(_), args, .. }) => {
                    transposed = !transposed;
                    buffer = args[0];
                    continue;
                }
                Some(Instruction::Compute { op, args, .. }) => Some((op, &args[..])),
                Some(Instruction::Record { .. } | Instruction::Wait { .. }) | None => None,
            };
            return Origin { buffer, op, moved, reduced, transposed };
        }
    }

    /// What a value was before casts and moves; it is looked at to recognize parameters.
    fn cast_from(&self, buffer: Buffer) -> Buffer {
        if self.plan.buffers[buffer].role == plan::Role::Param {
            return buffer;
        }
        let origin = self.origin(buffer);
        match origin.op {
            Some((Op::Cast(_), args)) => self.cast_from(args[0]),
            _ => origin.buffer,
        }
    }
}

/// An operand of which it is not said yet what it is to the GEMM.
struct Operand {
    data: ScaledOperand,
    is_param: bool,
    columns: bool,
}

impl Operand {
    fn named(self, role: Role) -> ScaledOperand {
        ScaledOperand { role, ..self.data }
    }
}
