//! All ranks of a mesh in memory: what each does, and NCCL as a loop over groups. Expected is
//! `ir::placement::apply_step`.

use ir::placement::{
    Axis, CommCost, DimLayout, Step, apply_step, classify, for_each_copy, reshard,
};
use smallvec::smallvec;

use super::*;
use crate::cuda::boxes::BOX_WORDS;
use crate::cuda::{Arg, Launch, Word};

/// The memory of one rank, in bytes.
struct Rank {
    arg: Vec<u8>,
    result: Vec<u8>,
    workspace: Vec<u8>,
}

/// What memory holds that nobody has written.
const GARBAGE: u8 = 0xab;

impl Rank {
    fn bytes(&mut self, pointer: Pointer) -> &mut [u8] {
        match pointer {
            Pointer::Arg(0) => &mut self.arg,
            Pointer::Result(0) => &mut self.result,
            Pointer::Workspace(at) => &mut self.workspace[at as usize..],
            other => panic!("{other:?} is not memory of a part"),
        }
    }

    fn copy(&mut self, from: Place, to: Place, bytes: u64) {
        let (start, bytes) = (from.1 as usize, bytes as usize);
        let moved = self.bytes(from.0)[start..start + bytes].to_vec();
        self.put(to, &moved);
    }

    fn get(&mut self, from: Place, bytes: u64) -> Vec<u8> {
        let start = from.1 as usize;
        self.bytes(from.0)[start..start + bytes as usize].to_vec()
    }

    fn put(&mut self, to: Place, bytes: &[u8]) {
        let start = to.1 as usize;
        self.bytes(to.0)[start..start + bytes.len()].copy_from_slice(bytes);
    }

    fn run(&mut self, program: &Program) {
        for work in &program.work {
            match work {
                Work::Fill { to, bytes, value } => {
                    self.bytes(*to)[..*bytes as usize].fill(*value);
                }
                Work::Launch(launch) if launch.function.entry == "add" => self.add(launch),
                Work::Launch(launch) => self.copy_boxes(launch, &program.table),
                other => panic!("{other:?} moves nothing"),
            }
        }
    }

    /// `add` of `add.cu`, of numbers in f32.
    fn add(&mut self, launch: &Launch) {
        let [Arg::Pointer(to), Arg::Pointer(a), Arg::Pointer(b), Arg::I64(n)] = launch.args[..]
        else {
            panic!("{:?}", launch.args);
        };
        let [a, b] = [a, b].map(|it| floats(&self.get((it, 0), n as u64 * 4)));
        let sums: Vec<f32> = a.iter().zip(&b).map(|(a, b)| a + b).collect();
        self.put((to, 0), &bytes(&sums));
    }

    /// `copy_boxes` of `boxes.cu`, thread by thread.
    fn copy_boxes(&mut self, launch: &Launch, table: &[Word]) {
        let unit = match launch.function.defines[0].as_str() {
            "V=uint4" => 16,
            "V=uint2" => 8,
            "V=u32" => 4,
            "V=u16" => 2,
            "V=u8" => 1,
            other => panic!("{other}"),
        };
        let [Arg::Pointer(Pointer::Table(start)), Arg::I32(n), Arg::I64(units)] = launch.args[..]
        else {
            panic!("{:?}", launch.args);
        };
        let words = &table[start as usize..start as usize + n as usize * BOX_WORDS];
        let boxes: Vec<&[Word]> = words.chunks(BOX_WORDS).collect();
        for i in 0..units as u64 {
            let at = boxes.iter().rposition(|it| value(it[4]) <= i).expect("boxes start at 0");
            let it = boxes[at];
            let [n1, n2, n3] = [5, 6, 7].map(|at| value(it[at]));
            let rest = i - value(it[4]);
            let coords = [rest / n3 / n2 / n1, rest / n3 / n2 % n1, rest / n3 % n2];
            let place = |pointer: usize, first: usize, strides: usize| {
                let Word::Pointer(pointer) = it[pointer] else { panic!("{it:?}") };
                let outer: u64 = (0..3).map(|d| coords[d] * value(it[strides + d])).sum();
                (pointer, (value(it[first]) + outer + rest % n3) * unit)
            };
            self.copy(place(0, 2, 8), place(1, 3, 11), unit);
        }
    }
}

fn value(word: Word) -> u64 {
    match word {
        Word::Value(it) => it,
        Word::Pointer(_) | Word::Pieces { .. } => panic!("{word:?} is no number"),
    }
}

/// NCCL: the n-th transfer of each rank of a group is one call.
fn transfer(ranks: &mut [Rank], group: &[usize], movements: &[Movement]) {
    let lists: Vec<&[Transfer]> = group.iter().map(|&it| &movements[it].transfers[..]).collect();
    if lists.iter().any(|it| {
        it.iter().any(|it| matches!(it, Transfer::Send { .. } | Transfer::Receive { .. }))
    }) {
        return send(ranks, group, &lists);
    }
    assert!(lists.iter().all(|it| it.len() == lists[0].len()), "all ranks make the same calls");
    for n in 0..lists[0].len() {
        match lists[0][n] {
            Transfer::AllReduce { elements, dtype, op, .. } => {
                let bytes = elements * dtype.bytes();
                let gives = group.iter().zip(&lists).map(|(&rank, list)| {
                    let Transfer::AllReduce { from, elements: n, .. } = list[n] else { panic!() };
                    assert_eq!(n, elements);
                    ranks[rank].get(from, bytes)
                });
                let reduced = reduce(op, &gives.collect::<Vec<_>>());
                for (&rank, list) in group.iter().zip(&lists) {
                    let Transfer::AllReduce { to, .. } = list[n] else { panic!() };
                    ranks[rank].put(to, &reduced);
                }
            }
            Transfer::Broadcast { .. } => unreachable!("no collective of a plan is one"),
            Transfer::AllGather { bytes, .. } => {
                let gives = group.iter().zip(&lists).map(|(&rank, list)| {
                    let Transfer::AllGather { from, bytes: n, .. } = list[n] else { panic!() };
                    assert_eq!(n, bytes);
                    ranks[rank].get(from, bytes)
                });
                let all = gives.collect::<Vec<_>>().concat();
                for (&rank, list) in group.iter().zip(&lists) {
                    let Transfer::AllGather { to, .. } = list[n] else { panic!() };
                    ranks[rank].put(to, &all);
                }
            }
            Transfer::ReduceScatter { elements, dtype, op, .. } => {
                let bytes = elements * dtype.bytes();
                let gives = group.iter().zip(&lists).map(|(&rank, list)| {
                    let Transfer::ReduceScatter { from, elements: n, .. } = list[n] else {
                        panic!()
                    };
                    assert_eq!(n, elements);
                    ranks[rank].get(from, bytes * group.len() as u64)
                });
                let reduced = reduce(op, &gives.collect::<Vec<_>>());
                for (piece, (&rank, list)) in group.iter().zip(&lists).enumerate() {
                    let Transfer::ReduceScatter { to, .. } = list[n] else { panic!() };
                    let start = piece * bytes as usize;
                    ranks[rank].put(to, &reduced[start..start + bytes as usize]);
                }
            }
            Transfer::Send { .. } | Transfer::Receive { .. } => unreachable!("sent above"),
        }
    }
}

/// Each send meets the receive of its peer.
fn send(ranks: &mut [Rank], group: &[usize], lists: &[&[Transfer]]) {
    let mut under_way = std::collections::BTreeMap::new();
    for (sender, (&rank, list)) in group.iter().zip(lists).enumerate() {
        for it in *list {
            if let Transfer::Send { from, peer, bytes } = *it {
                let data = ranks[rank].get(from, bytes);
                assert!(under_way.insert((sender as u32, peer), data).is_none());
            }
        }
    }
    for (receiver, (&rank, list)) in group.iter().zip(lists).enumerate() {
        for it in *list {
            if let Transfer::Receive { to, peer, bytes } = *it {
                let data = under_way.remove(&(peer, receiver as u32)).expect("it was sent");
                assert_eq!(data.len() as u64, bytes);
                ranks[rank].put(to, &data);
            }
        }
    }
    assert!(under_way.is_empty(), "all that is sent is received");
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks(4).map(|it| f32::from_le_bytes(it.try_into().expect("four bytes"))).collect()
}

fn bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|it| it.to_le_bytes()).collect()
}

fn reduce(op: ReduceOp, values: &[Vec<u8>]) -> Vec<u8> {
    let mut acc = floats(&values[0]);
    for other in &values[1..] {
        for (acc, value) in acc.iter_mut().zip(floats(other)) {
            *acc = match op {
                ReduceOp::Sum | ReduceOp::Avg => *acc + value,
                ReduceOp::Max => acc.max(value),
                ReduceOp::Min => acc.min(value),
            };
        }
    }
    if op == ReduceOp::Avg {
        acc.iter_mut().for_each(|it| *it /= values.len() as f32);
    }
    bytes(&acc)
}

/// Compact values of a coordinate in its buffer, zeros around them.
fn padded(
    sharding: &Sharding,
    shape: &[u64],
    mesh: &Mesh,
    coord: &[u32],
    local: &[f64],
) -> Vec<f32> {
    let buffer = sharding.local_shape(shape, mesh);
    let extents = sharding.extents(shape, mesh, coord);
    let mut res = vec![0.0; buffer.iter().product::<u64>() as usize];
    let runs: Vec<CopyRuns> = extents.iter().map(|&it| smallvec![(0, 0, it)]).collect();
    for_each_copy(&extents, &buffer, &runs, |from, to, n| {
        for i in 0..n {
            res[(to + i) as usize] = local[(from + i) as usize] as f32;
        }
    });
    res
}

/// Values as elements of a type. Codes, which only move, need not be of these values.
fn stored(values: &[f32], dtype: DType) -> Vec<u8> {
    match dtype.bytes() {
        1 => values.iter().map(|it| (it / 60.0) as u64 as u8).collect(),
        _ => bytes(values),
    }
}

/// The content of a destination before a step.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Content {
    /// Numbers that are overwritten.
    Garbage,
    /// Numbers, other ones on each rank, to which the step adds.
    Sum,
}

impl Content {
    /// The elements of a rank's shard, without padding.
    fn elements(self, rank: u64, n: usize) -> Vec<f64> {
        match self {
            Content::Garbage => vec![0.0; n],
            Content::Sum => (0..n).map(|i| (3 + 5 * i) as f64 + 100_000.0 * rank as f64).collect(),
        }
    }
}

/// Runs a step on all ranks and compares, in f32 and in bytes where nothing is summed; returns how the
/// former moved. A reduction is run once more, adding to sums.
#[track_caller]
fn check(step: &Step, from: &Sharding, shape: &[u64], mesh: &Mesh) -> Transport {
    let kind = CollectiveKind::from(step.kind);
    let floats = TensorType::new(DType::F32, shape);
    match kind {
        CollectiveKind::AllReduce(_) | CollectiveKind::ReduceScatter(_) => {
            check_of(step, from, &floats, mesh, Content::Sum);
        }
        _ => {
            let codes = TensorType::new(DType::E4M3, shape);
            check_of(step, from, &codes, mesh, Content::Garbage);
        }
    }
    check_of(step, from, &floats, mesh, Content::Garbage)
}

#[track_caller]
fn check_of(
    step: &Step,
    from: &Sharding,
    ty: &TensorType,
    mesh: &Mesh,
    content: Content,
) -> Transport {
    let (kind, axes) = (CollectiveKind::from(step.kind), step.kind.axes());
    let (shape, dtype) = (ty.shape.as_slice(), ty.dtype);
    let part = Part { ty, from, to: &step.to, adds: content == Content::Sum };
    let coords: Vec<Coord> = mesh.coords().collect();
    // Whole numbers, so that sums and averages are exact. Ranks that hold copies hold the same.
    let locals: Vec<Vec<f64>> = coords
        .iter()
        .map(|coord| {
            let own = mesh.index_in(from.partial_axes(), coord) * 7 * 60;
            let shard = mesh.index_in(from.sharded_axes(), coord) * 1000 * 60;
            let n: u64 = from.extents(shape, mesh, coord).iter().product();
            (0..n).map(|i| (60 * i + own + shard) as f64).collect()
        })
        .collect();
    let movements: Vec<Movement> =
        coords.iter().map(|it| movement(kind, axes, &[part], mesh, it).expect("a step")).collect();
    let workspace = workspace(kind, axes, [part], mesh);
    let bytes_of =
        |it: &Sharding| it.local_shape(shape, mesh).iter().product::<u64>() * dtype.bytes();
    let held = |coord: &Coord| {
        let n: u64 = step.to.extents(shape, mesh, coord).iter().product();
        content.elements(mesh.rank_of(coord), n as usize)
    };
    let mut ranks: Vec<Rank> = coords
        .iter()
        .zip(&locals)
        .map(|(coord, local)| Rank {
            arg: stored(&padded(from, shape, mesh, coord, local), dtype),
            result: match content {
                Content::Garbage => vec![GARBAGE; bytes_of(&step.to) as usize],
                Content::Sum => bytes(&padded(&step.to, shape, mesh, coord, &held(coord))),
            },
            workspace: vec![GARBAGE; workspace as usize],
        })
        .collect();
    for (rank, it) in ranks.iter_mut().zip(&movements) {
        assert_eq!(it.workspace, workspace, "as planned");
        rank.run(&it.before);
    }
    for coord in coords.iter().filter(|it| mesh.index_in(axes, it) == 0) {
        let group: Vec<usize> =
            mesh.group_of(axes, coord).map(|it| mesh.rank_of(&it) as usize).collect();
        transfer(&mut ranks, &group, &movements);
    }
    for (rank, it) in ranks.iter_mut().zip(&movements) {
        rank.run(&it.after);
    }
    let expect = apply_step(step, from, shape, mesh, &locals);
    for ((coord, rank), local) in coords.iter().zip(&ranks).zip(&expect) {
        let sum: Vec<f64> = held(coord).iter().zip(local).map(|(a, b)| a + b).collect();
        let expect = padded(&step.to, shape, mesh, coord, &sum);
        let (from, to) = (from.display(mesh), step.to.display(mesh));
        assert_eq!(
            rank.result,
            stored(&expect, dtype),
            "{kind}: {from} to {to} of {ty} at {coord:?}, onto {content:?}"
        );
    }
    transport(kind, axes, part, mesh)
}

/// The one step between two shardings.
#[track_caller]
fn step(mesh: &Mesh, shape: &[u64], from: &str, to: &str) -> Transport {
    let [from, to] = [from, to].map(|it| Sharding::parse(it, mesh).expect("a sharding"));
    let kind = classify(&from, &to, shape, mesh).expect("one step");
    check(&Step { kind, to }, &from, shape, mesh)
}

fn mesh() -> Mesh {
    Mesh::new(&[("dp", 2), ("tp", 4)])
}

#[test]
fn even_gathers_go_straight_to_their_place() {
    let m = mesh();
    let gather = |rows, bytes| Transport::AllGather { rows, bytes };
    assert_eq!(step(&m, &[16, 3], "[tp, _]", "[_, _]"), gather(1, 4 * 3 * 4));
    assert_eq!(step(&m, &[16, 3], "[tp.dp, _]", "[tp, _]"), gather(1, 2 * 3 * 4));
    assert_eq!(step(&m, &[16, 3], "[dp.tp, _]", "[_, _]"), gather(1, 2 * 3 * 4));
    // Sequence parallelism, of two sequences.
    assert_eq!(step(&m, &[2, 8, 5], "[_, tp, _]", "[_, _, _]"), gather(2, 2 * 5 * 4));
    // Padding in another dimension travels along.
    assert_eq!(step(&m, &[8, 3], "[tp, dp]", "[_, dp]"), gather(1, 2 * 2 * 4));
}

#[test]
fn other_gathers_are_sorted_out() {
    let m = mesh();
    let unpack = |elements: u64| Transport::GatherUnpack { bytes: elements * 4, ranks: 4 };
    assert_eq!(step(&m, &[7, 3], "[tp, _]", "[_, _]"), unpack(2 * 3));
    assert_eq!(step(&m, &[100, 8], "[_, tp]", "[_, _]"), unpack(100 * 2));
    assert_eq!(step(&m, &[16], "[x2.tp]", "[_]"), unpack(4));
    // Ranks are in mesh order, digits are not.
    let both = step(&m, &[16], "[tp.dp]", "[_]");
    assert_eq!(both, Transport::GatherUnpack { bytes: 2 * 4, ranks: 8 });
}

#[test]
fn even_scatters_go_straight_to_their_place() {
    let m = mesh();
    let scatter = |rows, elements| Transport::ReduceScatter { rows, elements };
    assert_eq!(step(&m, &[16, 3], "[_, _] sum(tp)", "[tp, _]"), scatter(1, 4 * 3));
    assert_eq!(step(&m, &[16, 3], "[tp, _] sum(dp)", "[tp.dp, _]"), scatter(1, 2 * 3));
    assert_eq!(step(&m, &[2, 8, 5], "[_, _, _] avg(tp)", "[_, tp, _]"), scatter(2, 2 * 5));
    assert_eq!(step(&m, &[16], "[_] max(dp, tp)", "[tp] max(dp)"), scatter(1, 4));
}

#[test]
fn other_scatters_are_packed() {
    let m = mesh();
    let pack = |elements| Transport::PackScatter { elements, bytes: elements * 4, ranks: 4 };
    assert_eq!(step(&m, &[7, 3], "[_, _] sum(tp)", "[tp, _]"), pack(2 * 3));
    assert_eq!(step(&m, &[100, 8], "[_, _] sum(tp)", "[_, tp]"), pack(100 * 2));
    // The last of the ranks gets nothing, the others a part.
    assert_eq!(step(&m, &[5], "[_] min(tp)", "[tp]"), pack(2));
}

/// One part of a reduction that adds to a sum, between two shardings; and the workspace that it takes.
#[track_caller]
fn added_step(mesh: &Mesh, shape: &[u64], from: &str, to: &str) -> (Transport, u64) {
    let [from, to] = [from, to].map(|it| Sharding::parse(it, mesh).expect("a sharding"));
    let kind = classify(&from, &to, shape, mesh).expect("one step");
    let ty = TensorType::new(DType::F32, shape);
    let part = Part { ty: &ty, from: &from, to: &to, adds: true };
    let workspace = workspace(kind.into(), kind.axes(), [part], mesh);
    let step = Step { kind, to: to.clone() };
    (check_of(&step, &from, &ty, mesh, Content::Sum), workspace)
}

/// `+%acc = reduce_scatter(..)`: what arrives goes to the workspace first, behind which packed pieces are.
#[test]
fn reductions_add_to_what_is_there() {
    let m = mesh();
    let scatter = |rows, elements| Transport::ReduceScatter { rows, elements };
    let pack = |elements| Transport::PackScatter { elements, bytes: elements * 4, ranks: 4 };
    let check = |shape: &[u64], from: &str, to: &str, expect: Transport, workspace: u64| {
        assert_eq!(added_step(&m, shape, from, to), (expect, workspace), "{from} to {to}");
    };
    // Even.
    check(&[16, 3], "[_, _] sum(tp)", "[tp, _]", scatter(1, 4 * 3), 256);
    check(&[16, 3], "[tp, _] sum(dp)", "[tp.dp, _]", scatter(1, 2 * 3), 256);
    check(&[2, 8, 5], "[_, _, _] avg(tp)", "[_, tp, _]", scatter(2, 2 * 5), 256);
    // Uneven, and in granules of 3: of 4 granules each coordinate has one; of 5, they have 2, 2, 1 and none.
    check(&[7, 3], "[_, _] sum(tp)", "[tp, _]", pack(2 * 3), 256 + 256);
    check(&[12], "[_] sum(tp)", "[tp%3]", scatter(1, 3), 256);
    check(&[15, 64], "[_, _] sum(tp)", "[tp%3, _]", pack(6 * 64), 1536 + 4 * 1536);
    // Shards that are empty: 3 rows over 4 coordinates, 5 over 8.
    check(&[3, 2], "[_, _] sum(tp)", "[tp, _]", pack(2), 256 + 256);
    let one = Transport::PackScatter { elements: 1, bytes: 4, ranks: 2 };
    check(&[5], "[tp] sum(dp)", "[tp.dp]", one, 256 + 256);
    // Reductions to all, and groups of one.
    check(&[7, 3], "[tp, _] sum(dp)", "[tp, _]", Transport::AllReduce { elements: 2 * 3 }, 256);
    let one = Mesh::new(&[("dp", 1), ("tp", 2)]);
    assert_eq!(added_step(&one, &[5], "[tp] sum(dp)", "[tp.dp]"), (Transport::Local, 256));
    assert_eq!(added_step(&m, &[0, 3], "[_, _] sum(tp)", "[tp, _]"), (Transport::Local, 0));
}

#[test]
fn all_reduces_take_padding_along() {
    let m = mesh();
    let reduce = |elements| Transport::AllReduce { elements };
    assert_eq!(step(&m, &[7, 3], "[tp, _] sum(dp)", "[tp, _]"), reduce(2 * 3));
    assert_eq!(step(&m, &[], "[] avg(dp, tp)", "[]"), reduce(1));
}

#[test]
fn exchanges() {
    let m = mesh();
    let exchange = |send, receive| Transport::Exchange { send, receive };
    assert_eq!(step(&m, &[8, 12], "[tp, _]", "[_, tp]"), exchange(2 * 12 * 4, 8 * 3 * 4));
    assert_eq!(step(&m, &[7, 5], "[tp, _]", "[_, tp]"), exchange(2 * 5 * 4, 7 * 2 * 4));
    assert_eq!(step(&m, &[16], "[dp.tp]", "[tp.dp]"), exchange(8, 8));
    assert_eq!(step(&m, &[2, 8, 4, 6], "[_, tp, _, _]", "[_, _, tp, _]").workspace(), 2 * 512);
}

#[test]
fn local_steps_and_groups_of_one() {
    let m = mesh();
    assert_eq!(step(&m, &[7, 3], "[_, _]", "[tp, _]"), Transport::Local);
    assert_eq!(step(&m, &[7, 5], "[dp, _]", "[dp, tp]"), Transport::Local);
    assert_eq!(step(&m, &[7, 3], "[tp, _]", "[tp, _] sum(dp)"), Transport::Local);
    assert_eq!(step(&m, &[7, 3], "[tp, _]", "[tp, _] max(dp)"), Transport::Local);
    let one = Mesh::new(&[("dp", 1), ("tp", 2)]);
    assert_eq!(step(&one, &[4], "[dp]", "[_]"), Transport::Local);
    assert_eq!(step(&one, &[4], "[_] sum(dp)", "[_]"), Transport::Local);
    assert_eq!(step(&one, &[4], "[_] avg(dp)", "[dp]"), Transport::Local);
    // An axis of one beside another.
    assert_eq!(step(&one, &[4], "[dp.tp]", "[_]"), Transport::AllGather { rows: 1, bytes: 8 });
}

#[test]
fn empty_tensors_move_nowhere() {
    assert_eq!(step(&mesh(), &[0, 3], "[tp, _]", "[_, _]"), Transport::Local);
}

/// Numbers without pattern, the same in every run.
struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        (self.0 >> 33) % n
    }

    /// Each axis cuts a dimension, is partial, or has copies; some dimensions are cut in granules.
    fn sharding(&mut self, mesh: &Mesh, shape: &[u64], op: ReduceOp) -> Sharding {
        let ndim = shape.len();
        let mut digits: Vec<Vec<Digit>> = vec![Vec::new(); ndim];
        let mut partial = AxisSet::EMPTY;
        let mut axes: Vec<Axis> = mesh.axes().collect();
        while !axes.is_empty() {
            let axis = axes.remove(self.below(axes.len() as u64) as usize);
            let to = self.below(ndim as u64 + 2) as usize;
            if to < ndim {
                if self.below(4) == 0 {
                    digits[to].push(Digit::Block(2 + self.below(2) as u32));
                }
                digits[to].push(Digit::Axis(axis));
            } else if to == ndim {
                partial = partial.with(axis);
            }
        }
        let dims = digits.into_iter().zip(shape).map(|(digits, size)| {
            let granule = 1 + self.below(3);
            let fits = size.is_multiple_of(granule);
            DimLayout::new(digits).in_granules(if fits { granule as u32 } else { 1 })
        });
        Sharding { dims: dims.collect(), partial: None }.with_partial(op, partial)
    }
}

#[test]
fn any_step_of_any_reshard() {
    let meshes = [
        mesh(),
        Mesh::new(&[("a", 3)]),
        Mesh::new(&[("a", 2), ("b", 1), ("c", 3)]),
        mesh().refine("tp", 2, "tp_kv", "tp_rep").expect("it divides"),
    ];
    let shapes: [&[u64]; 6] = [&[13], &[12], &[6, 7], &[8, 12], &[3, 4, 10], &[2, 1, 6, 5]];
    let mut random = Random(1);
    let mut seen = std::collections::BTreeMap::new();
    for case in 0..1500 {
        let mesh = &meshes[case % meshes.len()];
        let shape = shapes[random.below(shapes.len() as u64) as usize];
        let op = ReduceOp::ALL[random.below(4) as usize];
        let from = random.sharding(mesh, shape, op);
        let to = random.sharding(mesh, shape, op);
        let steps = reshard(&from, &to, shape, 4, mesh, &CommCost::default()).expect("they can be");
        let mut at = &from;
        for step in &steps {
            let transport = check(step, at, shape, mesh);
            let name = format!("{transport:?}");
            let name = name.split(' ').next().unwrap_or_default().to_string();
            *seen.entry(name).or_insert(0) += 1;
            at = &step.to;
        }
    }
    assert!(seen.len() == 7 && seen.values().all(|it| *it > 50), "{seen:?}");
}
