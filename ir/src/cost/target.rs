//! [`Target`]: a hardware profile, RON in `ir/profiles`, every figure with where it is from.

use std::sync::LazyLock;

use serde::{Deserialize, Serialize};

use crate::model::{bytes_of, locate};
use crate::ops::{Engine, Fp8Scales};
use crate::plan::{Instruction, Plan};
use crate::range::number_text;

/// A machine as the model sees it: nodes of ranks. See `ir/profiles/h200.ron`. Seconds, bytes, FLOP/s.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Target {
    /// What `--target` calls it.
    pub name: String,
    /// The machine in words.
    pub machine: String,
    /// Ranks of one node; neighbours in rank order.
    pub ranks_per_node: u32,
    /// Bytes that a rank has.
    pub memory: Figure,
    /// Bytes of it that are taken before any tensor is there: context, modules, libraries.
    pub reserved: Figure,
    /// Bytes that the first communicator takes, and each further one.
    pub communicators: (Figure, Figure),
    /// Bytes read and written a second by a large copy.
    pub bandwidth: Figure,
    /// Seconds from one launch of a recorded graph to the next, when neither does anything.
    pub launch: Figure,
    /// How many tiles of a GEMM are made at a time.
    pub processors: Figure,
    /// Rows and columns of such a tile.
    pub tile: (u64, u64),
    /// Peak bf16 FLOP/s of the data sheet, without sparsity. MFU and HFU are shares of it.
    pub peak: Figure,
    /// Peak FP8 FLOP/s of the data sheet; `None` if the machine has no FP8 GEMMs or its data sheet has no figure.
    #[serde(default)]
    pub fp8_peak: Option<Figure>,
    /// GEMMs alone on a cool card.
    pub gemm: Gemms,
    /// FLOP/s of causal attention, forward: one sequence of 8192, 32 query heads, 8 of keys, of 128. A query
    /// counts the keys that it sees.
    pub attention: Figure,
    /// What is left of the rate of GEMMs and attention when they run for as long as a step does: power.
    pub sustained: Figure,
    /// Share of its speed that an op loses while communication runs beside it; below 1.
    pub overlap: Figure,
    /// Between ranks of a node.
    pub node: Node,
    /// Bytes a second that a rank sends to another node, all ranks of a node at a time.
    pub network: Figure,
    /// Seconds that each further step of a ring or level of a tree adds.
    pub hops: Hops,
}

/// FLOP/s of `8192 x 8192 x 8192`, as measured, or none where the machine has no such GEMM.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Gemms {
    /// f32 operands.
    pub f32: Figure,
    /// bf16 operands.
    pub bf16: Figure,
    /// FP8, a scale for each operand, sums of fewer bits.
    pub fp8_fast: Option<Figure>,
    /// FP8, a scale for each operand, sums in f32.
    pub fp8: Option<Figure>,
    /// FP8, scales of 1 x 128 and of 128 x 128.
    pub fp8_block: Option<Figure>,
    /// FP8, scales of 1 x 128 on both sides.
    pub fp8_rows: Option<Figure>,
}

/// Collectives between ranks of one node.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Node {
    /// Shards become whole; all-to-all and permute are taken to be as fast.
    pub all_gather: Collectives,
    /// Partial values become shards.
    pub reduce_scatter: Collectives,
    /// Partial values become whole.
    pub all_reduce: Collectives,
    /// Seconds of an all-reduce of next to nothing between two ranks.
    pub small: Figure,
    /// How much slower the protocol for small messages sends than that for large ones.
    pub small_factor: Figure,
}

/// Bus bandwidth of one collective between two ranks, at two sizes, from which latency and bandwidth follow.
/// Sizes are of the whole tensor; bus bandwidth is what a rank sends over the time.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Collectives {
    /// Bytes and bytes a second of each measurement.
    pub points: [(u64, f64); 2],
    /// Where they are from.
    pub source: Source,
}

/// Seconds of one more step.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Hops {
    /// To a rank of the same node, with the protocol for large messages.
    pub node: f64,
    /// The same with that for small ones.
    pub node_small: f64,
    /// To another node, large.
    pub network: f64,
    /// To another node, small.
    pub network_small: f64,
    /// A level of a tree within a node, large.
    pub tree_node: f64,
    /// A level of a tree between nodes, large.
    pub tree_network: f64,
    /// A level of a tree between nodes, small.
    pub tree_network_small: f64,
    /// Where they are from.
    pub source: Source,
}

/// A number, and where it is from.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Figure(pub f64, pub Source);

/// Where a number is from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Source {
    /// We measured it: machine, versions, date, where it is written down.
    Measured(String),
    /// The maker says so: the document.
    Datasheet(String),
    /// It follows from others: how.
    Derived(String),
    /// Nobody measured it: why this number.
    Assumed(String),
}

impl Source {
    /// Returns true if somebody measured the number.
    pub fn is_measured(&self) -> bool {
        matches!(self, Source::Measured(_))
    }
}

/// A profile that cannot be read.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum TargetError {
    /// Not RON, or not a profile.
    #[error("{0}")]
    Parse(#[from] ron::error::SpannedError),
    /// A number that no machine has.
    #[error(
        "`{field}` is {}, and must be a number from {} to {}",
        number_text(*value), number_text(*least), number_text(*most)
    )]
    Range {
        /// Which.
        field: &'static str,
        /// What it is.
        value: f64,
        /// The least that it may be.
        least: f64,
        /// The most.
        most: f64,
    },
    /// A share that is none.
    #[error(
        "`{field}` is {}, and must be a share: 0 or more, and less than 1",
        number_text(*value)
    )]
    Share {
        /// Which.
        field: &'static str,
        /// What it is.
        value: f64,
    },
    /// Two measurements from which no latency and bandwidth follow.
    #[error(
        "`{field}` gives no latency and bandwidth: the second must be of a larger size, which takes longer and has the \
         higher bandwidth, of 1 byte a second or more"
    )]
    Points {
        /// The field, such as `node.all_gather.points`.
        field: &'static str,
    },
}

impl TargetError {
    /// The bytes of the profile to point at.
    pub fn span(&self, source: &str) -> Option<std::ops::Range<usize>> {
        match self {
            TargetError::Parse(it) => Some(bytes_of(source, it.span.clone())),
            // The number of a figure is the first of two.
            TargetError::Range { field, .. } | TargetError::Share { field, .. } => {
                locate(source, &format!("{field}[0]"))
            }
            TargetError::Points { field } => locate(source, field),
        }
    }
}

impl Target {
    /// Profiles that come with planc.
    pub const NAMES: [&str; 5] = ["a100", "b200", "cpu", "h100", "h200"];

    /// The profile of this name that comes with planc.
    pub fn builtin(name: &str) -> Option<Target> {
        let text = match name {
            "a100" => include_str!("../../profiles/a100.ron"),
            "b200" => include_str!("../../profiles/b200.ron"),
            "cpu" => include_str!("../../profiles/cpu.ron"),
            "h100" => include_str!("../../profiles/h100.ron"),
            "h200" => include_str!("../../profiles/h200.ron"),
            _ => return None,
        };
        Some(Target::parse(text).unwrap_or_else(|it| panic!("profile `{name}`: {it}")))
    }

    /// The profile whose prices decide where no target is named: the one that the model was calibrated on.
    pub fn reference() -> &'static Target {
        static REFERENCE: LazyLock<Target> =
            LazyLock::new(|| Target::builtin("h200").expect("it comes with planc"));
        &REFERENCE
    }

    /// Reads a profile.
    pub fn parse(text: &str) -> Result<Target, TargetError> {
        let res: Target = ron::from_str(text)?;
        res.validate()?;
        Ok(res)
    }

    fn validate(&self) -> Result<(), TargetError> {
        let Target { gemm, node, hops, .. } = self;
        // Within these no prediction leaves what an f64 holds.
        const AMOUNT: [f64; 2] = [1.0, 1e21];
        const BYTES: [f64; 2] = [0.0, 1e21];
        const SECONDS: [f64; 2] = [0.0, 1e3];
        let numbers: [(&str, f64, [f64; 2]); 25] = [
            ("ranks_per_node", self.ranks_per_node.into(), AMOUNT),
            ("memory", self.memory.0, AMOUNT),
            ("reserved", self.reserved.0, BYTES),
            ("communicators[0]", self.communicators.0.0, BYTES),
            ("communicators[1]", self.communicators.1.0, BYTES),
            ("bandwidth", self.bandwidth.0, AMOUNT),
            ("launch", self.launch.0, SECONDS),
            ("processors", self.processors.0, AMOUNT),
            ("tile[0]", self.tile.0 as f64, AMOUNT),
            ("tile[1]", self.tile.1 as f64, AMOUNT),
            ("peak", self.peak.0, AMOUNT),
            ("gemm.f32", gemm.f32.0, AMOUNT),
            ("gemm.bf16", gemm.bf16.0, AMOUNT),
            ("attention", self.attention.0, AMOUNT),
            ("sustained", self.sustained.0, [1e-3, 1.0]),
            ("node.small", node.small.0, SECONDS),
            ("node.small_factor", node.small_factor.0, [1e-3, 1e3]),
            ("network", self.network.0, AMOUNT),
            ("hops.node", hops.node, SECONDS),
            ("hops.node_small", hops.node_small, SECONDS),
            ("hops.network", hops.network, SECONDS),
            ("hops.network_small", hops.network_small, SECONDS),
            ("hops.tree_node", hops.tree_node, SECONDS),
            ("hops.tree_network", hops.tree_network, SECONDS),
            ("hops.tree_network_small", hops.tree_network_small, SECONDS),
        ];
        let fp8 = [
            ("fp8_peak", &self.fp8_peak),
            ("gemm.fp8_fast", &gemm.fp8_fast),
            ("gemm.fp8", &gemm.fp8),
            ("gemm.fp8_block", &gemm.fp8_block),
            ("gemm.fp8_rows", &gemm.fp8_rows),
        ];
        let fp8 = fp8.into_iter().filter_map(|it| Some((it.0, it.1.as_ref()?.0, AMOUNT)));
        for (field, value, [least, most]) in numbers.into_iter().chain(fp8) {
            if !(least..=most).contains(&value) {
                return Err(TargetError::Range { field, value, least, most });
            }
        }
        if !(0.0..1.0).contains(&self.overlap.0) {
            return Err(TargetError::Share { field: "overlap", value: self.overlap.0 });
        }
        let kinds = [
            ("node.all_gather.points", &node.all_gather),
            ("node.reduce_scatter.points", &node.reduce_scatter),
            ("node.all_reduce.points", &node.all_reduce),
        ];
        match kinds.into_iter().find(|it| !it.1.makes_sense(AMOUNT)) {
            Some((field, _)) => Err(TargetError::Points { field }),
            None => Ok(()),
        }
    }

    /// The sources of all its figures.
    pub fn sources(&self) -> Vec<&Source> {
        let Target { memory, reserved, communicators, bandwidth, launch, processors, .. } = self;
        let Target { peak, fp8_peak, gemm, attention, sustained, overlap, .. } = self;
        let Target { node, network, hops, .. } = self;
        let Gemms { f32, bf16, fp8_fast, fp8, fp8_block, fp8_rows } = gemm;
        let Node { all_gather, reduce_scatter, all_reduce, small, small_factor } = node;
        let figures = [memory, reserved, &communicators.0, &communicators.1, bandwidth, launch]
            .into_iter()
            .chain([processors, peak, f32, bf16, attention, sustained, overlap])
            .chain([fp8_peak, fp8_fast, fp8, fp8_block, fp8_rows].into_iter().flatten())
            .chain([small, small_factor, network]);
        let collectives = [all_gather, reduce_scatter, all_reduce].map(|it| &it.source);
        figures.map(|it| &it.1).chain(collectives).chain([&hops.source]).collect()
    }

    /// Bytes that are taken beside a plan with so many communicators.
    pub fn bytes_beside_plan(&self, communicators: usize) -> u64 {
        let (first, further) = &self.communicators;
        let taken = match communicators {
            0 => 0.0,
            n => first.0 + further.0 * (n - 1) as f64,
        };
        (self.reserved.0 + taken) as u64
    }

    /// Whether the machine has the GEMMs of a plan: FP8 is not for all.
    pub fn multiplies(&self, plan: &Plan) -> bool {
        let lacks = |it: &Instruction| match it {
            Instruction::Compute { op, .. } => match op.engine() {
                Engine::Fp8Gemm { scales, fast } => self.gemm.fp8(scales, fast).is_none(),
                Engine::Memory | Engine::Gemm | Engine::Attention => false,
            },
            _ => false,
        };
        !plan.sections.iter().flatten().any(lacks)
    }
}

impl Gemms {
    /// The rate of a GEMM on FP8 data.
    pub(super) fn fp8(&self, scales: Fp8Scales, fast: bool) -> Option<&Figure> {
        let rate = match scales {
            Fp8Scales::Row => &self.fp8_rows,
            Fp8Scales::Block => &self.fp8_block,
            Fp8Scales::Tensor if fast => &self.fp8_fast,
            Fp8Scales::Tensor => &self.fp8,
        };
        rate.as_ref()
    }
}

impl Collectives {
    /// Seconds of latency and bytes sent a second, of an all-gather's or reduce-scatter's kind if `share` (what a
    /// rank sends of the whole) is 1/2, of an all-reduce's if it is 1.
    pub(super) fn fit(&self, share: f64) -> (f64, f64) {
        let [(small, small_bus), (large, large_bus)] = self.points;
        let (small, large) = (share * small as f64, share * large as f64);
        let (small_seconds, large_seconds) = (small / small_bus, large / large_bus);
        let bandwidth = (large - small) / (large_seconds - small_seconds);
        (small_seconds - small / bandwidth, bandwidth)
    }

    /// Whether a latency and a bandwidth follow, with bandwidths from `least` to `most`.
    fn makes_sense(&self, [least, most]: [f64; 2]) -> bool {
        let [(small, small_bus), (large, large_bus)] = self.points;
        let (latency, bandwidth) = self.fit(1.0);
        let in_range = |it: f64| (least..=most).contains(&it);
        small < large
            && [small_bus, large_bus, bandwidth].into_iter().all(in_range)
            && latency >= 0.0
    }
}
