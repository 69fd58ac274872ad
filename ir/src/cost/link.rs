//! What a collective takes.
//!
//! ```text
//! ring   latency + hops(steps) + bytes sent / bandwidth       all-gather, reduce-scatter: g - 1 steps, all-reduce: twice
//! tree   latency + hops(2 levels) + 2 bytes / (0.9 bandwidth) all-reduce: up and down; within a node a chain
//! ```
//!
//! Either with a protocol for large messages or one for small ones, of less latency and bandwidth; the fastest is
//! taken, as NCCL does (its `tuning.cc`). Latency and bandwidth between two ranks of a node follow from two
//! measurements. A ring through several nodes leaves each node by the links of all its members there, so it has the
//! bandwidth of the node or of `members in a node` network links, whichever is less.

use cranelift_entity::{EntityRef, PrimaryMap};

use super::target::Target;
use crate::ops::CollectiveKind;
use crate::placement::{AxisSet, Mesh};
use crate::plan::{Comm, Part, Plan};
use crate::summary::traffic;

/// What NCCL takes a tree's bandwidth to be, as a share of a ring's (`tuning.cc`).
const TREE_BANDWIDTH: f64 = 0.9;

/// Where the ranks of a group are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Group {
    /// How many there are.
    pub ranks: u64,
    /// Over how many nodes they are spread; of the group that is spread most.
    pub nodes: u64,
    /// How many are in one node, at least, of those in which any is.
    pub in_node: u64,
}

impl Group {
    /// Groups over `axes`, where a node has `ranks_per_node` neighbours in rank order.
    pub fn of(mesh: &Mesh, axes: AxisSet, ranks_per_node: u32) -> Group {
        let ranks = mesh.set_size(axes);
        let per_node = u64::from(ranks_per_node);
        let offsets = offsets(mesh, axes);
        let mut res = Group { ranks, nodes: 1, in_node: ranks };
        for base in self::offsets(mesh, mesh.all().minus(axes)) {
            let mut nodes: Vec<u64> = offsets.iter().map(|it| (base + it) / per_node).collect();
            nodes.sort_unstable();
            let counts = nodes.chunk_by(|a, b| a == b).map(|it| it.len() as u64);
            res.nodes = res.nodes.max(counts.clone().count() as u64);
            res.in_node = res.in_node.min(counts.min().unwrap_or(ranks));
        }
        res
    }

    /// Whether all groups are within a node.
    pub fn is_in_node(self) -> bool {
        self.nodes == 1
    }
}

/// Ranks of the coordinates that are 0 outside `axes`.
fn offsets(mesh: &Mesh, axes: AxisSet) -> Vec<u64> {
    let mut res = vec![0];
    for axis in mesh.axes() {
        let size = u64::from(mesh.size(axis));
        let here = if axes.contains(axis) { size } else { 1 };
        res = res.iter().flat_map(|it| (0..here).map(move |at| it * size + at)).collect();
    }
    res
}

/// Times of the collectives of a plan.
pub(super) struct Links<'a> {
    plan: &'a Plan,
    target: &'a Target,
    groups: PrimaryMap<Comm, Group>,
}

/// A way to send: seconds between two ranks of a node, bytes a second, and seconds of a hop.
struct Protocol {
    latency: f64,
    bandwidth: f64,
    hop: [f64; 2],
    tree_hop: [f64; 2],
}

impl<'a> Links<'a> {
    pub fn new(plan: &'a Plan, target: &'a Target) -> Links<'a> {
        let mut groups: PrimaryMap<Comm, Group> = PrimaryMap::new();
        for (comm, &axes) in &plan.comms {
            let same = plan.comms.iter().find(|it| *it.1 == axes && it.0.index() < comm.index());
            groups.push(match same {
                Some((same, _)) => groups[same],
                None => Group::of(&plan.mesh, axes, target.ranks_per_node),
            });
        }
        Links { plan, target, groups }
    }

    /// Seconds of a collective that is not local.
    pub fn seconds(&self, kind: CollectiveKind, comm: Comm, parts: &[Part]) -> f64 {
        let (bytes, sent) = traffic(self.plan, kind, self.plan.comms[comm], parts);
        // A sum is read, as what arrives is, and written.
        let added = parts.iter().filter(|it| it.adds).map(|it| 3 * self.plan.local_bytes(it.dst));
        let added = added.sum::<u64>() as f64 / self.target.bandwidth.0;
        seconds(self.target, kind, self.groups[comm], bytes as f64, sent as f64) + added
    }
}

/// Seconds of a collective of so many bytes, as [`traffic`] counts both.
fn seconds(target: &Target, kind: CollectiveKind, group: Group, bytes: f64, sent: f64) -> f64 {
    if group.ranks <= 1 {
        return target.launch.0;
    }
    let reduces = matches!(kind, CollectiveKind::AllReduce(_));
    // Of a ring's steps, those that lead to another node.
    let rounds = if reduces { 2.0 } else { 1.0 };
    let between = rounds * (group.nodes - 1) as f64;
    let within = rounds * (group.ranks - 1) as f64 - between;
    let protocols = protocols(target, kind, group);
    let of = |it: &Protocol| {
        // One step of each round is in the latency.
        let hops = (within - rounds).max(0.0) * it.hop[0] + between * it.hop[1];
        let ring = it.latency + hops + sent / it.bandwidth;
        if !reduces {
            return ring;
        }
        let levels = (group.nodes as f64).log2().ceil();
        let chain = (group.ranks.div_ceil(group.nodes) - 1) as f64;
        let hops = 2.0 * ((chain - 1.0).max(0.0) * it.tree_hop[0] + levels * it.tree_hop[1]);
        ring.min(it.latency + hops + 2.0 * bytes / (TREE_BANDWIDTH * it.bandwidth))
    };
    protocols.iter().map(of).fold(f64::INFINITY, f64::min)
}

fn protocols(target: &Target, kind: CollectiveKind, group: Group) -> [Protocol; 2] {
    let (node, hops) = (&target.node, &target.hops);
    let (latency, bandwidth) = match kind {
        CollectiveKind::AllReduce(_) => node.all_reduce.fit(1.0),
        CollectiveKind::ReduceScatter(_) => node.reduce_scatter.fit(0.5),
        CollectiveKind::AllGather
        | CollectiveKind::AllToAll
        | CollectiveKind::Permute
        | CollectiveKind::Slice
        | CollectiveKind::ToPartial(_) => node.all_gather.fit(0.5),
    };
    let bandwidth = match group.is_in_node() {
        true => bandwidth,
        false => bandwidth.min(group.in_node as f64 * target.network.0),
    };
    let large = Protocol {
        latency,
        bandwidth,
        hop: [hops.node, hops.network],
        tree_hop: [hops.tree_node, hops.tree_network],
    };
    let small = Protocol {
        latency: node.small.0,
        bandwidth: bandwidth / node.small_factor.0,
        hop: [hops.node_small, hops.network_small],
        tree_hop: [hops.node_small, hops.tree_network_small],
    };
    [large, small]
}
