//! What holds for every layout, on meshes and sizes that proptest picks.

use std::collections::BTreeMap;

use ir::placement::{
    Axis, AxisSet, Digit, DimLayout, Mesh, Placement, PlacementError, ReduceOp, Sharding,
    copy_runs, for_each_copy,
};
use proptest::prelude::*;

use super::{indices, layout, rows};

/// Up to three axes, sizes from 1, the middle one refined where its size allows.
fn meshes() -> impl Strategy<Value = Mesh> {
    let sizes = prop::collection::vec(1..=5_u32, 1..=3);
    (sizes, any::<bool>()).prop_map(|(sizes, refined)| {
        let axes: Vec<(&str, u32)> = ["dp", "cp", "tp"].into_iter().zip(sizes).collect();
        let mesh = Mesh::new(&axes);
        match refined && axes.len() > 1 {
            true => mesh.refine("cp", 2, "cp_a", "cp_b").unwrap_or(mesh),
            false => mesh,
        }
    })
}

/// Deals the axes out to `ndim` dimensions in any order, with blocks in between and granules; some
/// axes stay unused and some are partial.
fn shardings(ndim: usize) -> impl Strategy<Value = (Mesh, Sharding)> {
    let deal = move |mesh: Mesh| {
        let n = mesh.axes.len();
        let order = Just(mesh.axes().collect::<Vec<Axis>>()).prop_shuffle();
        let roles = prop::collection::vec(0..ndim + 2, n);
        let blocks = prop::collection::vec(1..=4_u32, n);
        let granules = prop::collection::vec(prop_oneof![2 => Just(1), 1 => 2..=6_u32], ndim);
        let op = prop::sample::select(&ReduceOp::ALL[..]);
        let parts = (Just(mesh), order, roles, blocks, granules, op);
        parts.prop_map(move |(mesh, order, roles, blocks, granules, op)| {
            let mut digits = vec![Vec::new(); ndim];
            let mut partial = AxisSet::EMPTY;
            for ((axis, role), block) in order.into_iter().zip(roles).zip(blocks) {
                if role < ndim {
                    digits[role].extend([Digit::Block(block), Digit::Axis(axis)]);
                } else if role == ndim {
                    partial = partial.with(axis);
                }
            }
            let dims =
                digits.iter().zip(granules).map(|(it, n)| layout(it).in_granules(n)).collect();
            (mesh, Sharding { dims, partial: None }.with_partial(op, partial))
        })
    };
    meshes().prop_flat_map(deal)
}

fn sizes(n: usize) -> impl Strategy<Value = Vec<u64>> {
    prop::collection::vec(
        prop_oneof![3 => 0..=30_u64, 1 => Just(0), 1 => Just(1), 1 => Just(24)],
        n,
    )
}

/// `shape`, with each dimension made a multiple of its granule.
fn fitting(sharding: &Sharding, shape: Vec<u64>) -> Vec<u64> {
    let granules = sharding.dims.iter().map(|it| u64::from(it.granule()));
    shape.into_iter().zip(granules).map(|(size, n)| size.next_multiple_of(n)).collect()
}

proptest! {
    #[test]
    fn shards_partition_the_tensor((mesh, sharding) in shardings(2), shape in sizes(2)) {
        let shape = fitting(&sharding, shape);
        sharding.validate(&shape, &mesh).unwrap();
        let mut holders = BTreeMap::<u64, u64>::new();
        let buffer = sharding.local_shape(&shape, &mesh);
        let mut largest = vec![0; 2];
        for coord in mesh.coords() {
            let held = indices(&sharding, &shape, &mesh, &coord);
            let extents = sharding.extents(&shape, &mesh, &coord);
            prop_assert_eq!(held.len() as u64, extents.iter().product::<u64>());
            prop_assert!(extents.iter().zip(&buffer).all(|(extent, size)| extent <= size));
            for (largest, &extent) in largest.iter_mut().zip(&extents) {
                *largest = extent.max(*largest);
            }
            let chunks = sharding.chunks(&shape, &mesh, &coord);
            let volume = |it: &ir::placement::Chunk| it.sizes.iter().product::<u64>();
            prop_assert!(chunks.iter().all(|it| volume(it) > 0));
            for (dim, layout) in sharding.dims.iter().enumerate() {
                let whole = |it: u64| it.is_multiple_of(layout.granule().into());
                prop_assert!(chunks.iter().all(|it| whole(it.offsets[dim]) && whole(it.sizes[dim])));
            }
            prop_assert_eq!(chunks.iter().map(volume).sum::<u64>(), held.len() as u64);
            held.into_iter().for_each(|it| *holders.entry(it).or_default() += 1);
        }
        prop_assert_eq!(largest, buffer.to_vec());
        let copies = mesh.n_ranks() / mesh.set_size(sharding.sharded_axes());
        prop_assert_eq!(holders.len() as u64, shape.iter().product::<u64>());
        prop_assert!(holders.values().all(|&it| it == copies));
    }

    #[test]
    fn every_element_has_one_owner(
        (mesh, sharding) in shardings(2), shape in sizes(2), salt in any::<u64>()
    ) {
        let shape = fitting(&sharding, shape);
        let mut owners = BTreeMap::<u64, u64>::new();
        for coord in mesh.coords().filter(|it| sharding.owns(it, &mesh, salt)) {
            let held = indices(&sharding, &shape, &mesh, &coord);
            held.into_iter().for_each(|it| *owners.entry(it).or_default() += 1);
        }
        prop_assert_eq!(owners.len() as u64, shape.iter().product::<u64>());
        prop_assert!(owners.values().all(|&it| it == 1));
    }

    #[test]
    fn text_round_trips((mesh, sharding) in shardings(3)) {
        let text = sharding.display(&mesh).to_string();
        prop_assert_eq!(Sharding::parse(&text, &mesh), Ok(sharding), "{}", text);
    }

    #[test]
    fn torch_placements_round_trip(mesh in meshes(), picks in prop::collection::vec(0..12_usize, 3)) {
        let options = [
            Placement::Replicate,
            Placement::Shard { dim: 0 },
            Placement::Shard { dim: 0 },
            Placement::Shard { dim: 1 },
            Placement::StridedShard { dim: 0, split: 2 },
            Placement::StridedShard { dim: 0, split: 3 },
            Placement::StridedShard { dim: 0, split: 4 },
            Placement::StridedShard { dim: 0, split: 6 },
            Placement::StridedShard { dim: 0, split: 8 },
            Placement::StridedShard { dim: 0, split: 20 },
            Placement::StridedShard { dim: 1, split: 5 },
            Placement::Partial(ReduceOp::Sum),
        ];
        let n = mesh.user_axes().len();
        let placements: Vec<Placement> = picks.iter().take(n).map(|&it| options[it]).collect();
        if let Ok(sharding) = Sharding::from_torch(&placements, 2, &mesh) {
            prop_assert_eq!(sharding.to_torch(&mesh), Ok(placements));
        }
    }

    /// Every layout that does not use a part of an axis has a PyTorch name, and the name gives the
    /// layout back. Axes of size 1 may come back elsewhere in their dimension: they cut nothing.
    #[test]
    fn layouts_come_back_from_torch((mesh, sharding) in shardings(2)) {
        match sharding.to_torch(&mesh) {
            Ok(placements) => {
                let back = Sharding::from_torch(&placements, 2, &mesh).unwrap();
                if mesh.axes().all(|it| mesh.size(it) > 1) {
                    prop_assert_eq!(&back, &sharding);
                }
                let shape = [60, 60];
                if sharding.divides(&shape, &mesh) {
                    for coord in mesh.coords() {
                        let held = indices(&sharding, &shape, &mesh, &coord);
                        prop_assert_eq!(indices(&back, &shape, &mesh, &coord), held);
                    }
                }
            }
            Err(PlacementError::Rounded { dim, granule }) => {
                prop_assert_eq!(sharding.dims[dim].granule(), granule);
                prop_assert!(granule > 1);
            }
            Err(PlacementError::PartOfAxis { .. }) => {
                prop_assert!(mesh.axes.iter().any(|it| it.part_of.is_some()));
            }
            Err(other) => prop_assert!(false, "{other}"),
        }
    }

    /// Refining an axis moves no element, for any size.
    #[test]
    fn refined_axes_cut_as_one(size in 0..100_u64, major in 1..4_u32, minor in 1..4_u32) {
        let plain = Mesh::new(&[("dp", 2), ("tp", major * minor)]);
        let refined = plain.refine("tp", major, "tp_kv", "tp_rep").unwrap();
        for text in ["[tp]", "[dp.tp]", "[tp.dp]", "[x3.tp.dp]"] {
            let (a, b) = (super::parse(text, &plain), super::parse(text, &refined));
            for rank in 0..plain.n_ranks() {
                let held = rows(&a.dims[0], size, &plain, &plain.coord_of(rank));
                let coord = refined.coord_of(rank);
                prop_assert_eq!(rows(&b.dims[0], size, &refined, &coord), held);
            }
            prop_assert_eq!(a.to_torch(&plain), b.to_torch(&refined));
        }
    }

    #[test]
    fn join_is_the_layout_of_the_flattened_tensor((mesh, sharding) in shardings(2), shape in sizes(2)) {
        let shape = fitting(&sharding, shape);
        let parts: Vec<(DimLayout, u64)> =
            sharding.dims.iter().cloned().zip(shape.iter().copied()).collect();
        let Some(joined) = DimLayout::join(&parts, &mesh) else {
            let even = sharding.divides(&shape, &mesh);
            let whole = sharding.dims[1].is_whole();
            prop_assert!(!(even || whole) || shape.contains(&0));
            return Ok(());
        };
        let flat = shape[0] * shape[1];
        for coord in mesh.coords() {
            let mut held = indices(&sharding, &shape, &mesh, &coord);
            let ours = rows(&joined, flat, &mesh, &coord);
            // Joining is a local reshape: the local order stays.
            prop_assert_eq!(&ours, &held);
            held.dedup();
            prop_assert_eq!(ours.len(), held.len());
        }
        if mesh.axes().any(|it| mesh.size(it) == 1) || shape.contains(&0) {
            return Ok(());
        }
        let back = joined.split(&shape, &mesh).unwrap();
        let back = Sharding { dims: back.into_iter().collect(), partial: None };
        for coord in mesh.coords() {
            let ours = indices(&back, &shape, &mesh, &coord);
            prop_assert_eq!(ours, indices(&sharding, &shape, &mesh, &coord));
        }
        // Sizes of 1 and pieces of one granule may be cut in several ways.
        if !shape.contains(&1) && sharding.dims.iter().all(|it| it.granule() == 1) {
            prop_assert_eq!(back.dims, sharding.dims);
        }
    }

    #[test]
    fn split_gives_layouts_of_the_factors((mesh, sharding) in shardings(1), shape in sizes(3)) {
        let flat: u64 = shape.iter().product();
        prop_assume!(flat.is_multiple_of(sharding.dims[0].granule().into()));
        let Some(dims) = sharding.dims[0].split(&shape, &mesh) else { return Ok(()) };
        let grid = Sharding { dims: dims.into_iter().collect(), partial: None };
        for coord in mesh.coords() {
            let ours = indices(&grid, &shape, &mesh, &coord);
            prop_assert_eq!(ours, rows(&sharding.dims[0], flat, &mesh, &coord));
        }
    }

    #[test]
    fn copies_are_the_intersection((mesh, sharding) in shardings(2), size in 0..40_u64) {
        let (src, dst) = (&sharding.dims[0], &sharding.dims[1]);
        let size = size * u64::from(src.granule() * dst.granule());
        for from in mesh.coords() {
            for to in mesh.coords() {
                let (have, want) = (rows(src, size, &mesh, &from), rows(dst, size, &mesh, &to));
                let mut got = Vec::new();
                for (s, d, len) in copy_runs(src, dst, size, &mesh, &from, &to) {
                    for i in 0..len as usize {
                        prop_assert_eq!(have[s as usize + i], want[d as usize + i]);
                        got.push(have[s as usize + i]);
                    }
                }
                let both: Vec<u64> = have.into_iter().filter(|it| want.contains(it)).collect();
                prop_assert_eq!(got, both);
            }
        }
    }

    #[test]
    fn coordinates_number_ranks_row_major(mesh in meshes()) {
        let coords: Vec<_> = mesh.coords().collect();
        prop_assert!(coords.is_sorted());
        for (rank, coord) in coords.iter().enumerate() {
            prop_assert_eq!(mesh.rank_of(coord), rank as u64);
        }
    }
}

#[test]
fn layouts_are_normal() {
    let (a, b) = (Digit::Axis(Axis(0)), Digit::Axis(Axis(1)));
    let block = Digit::Block;
    assert_eq!(layout(&[block(1), a, block(1)]).digits(), [a]);
    assert_eq!(layout(&[block(2), block(3), a]).digits(), [block(6), a]);
    assert_eq!(layout(&[a, block(2), b, block(3), block(1)]).digits(), [a, block(2), b]);
    assert_eq!(layout(&[block(7)]), DimLayout::whole());
}

/// Block scaling's 128 rows with one scale, as `FSDP` cuts them.
#[test]
fn granules_are_never_parted() {
    let mesh = Mesh::new(&[("dp", 4), ("tp", 2)]);
    // Of each coordinate, in rank order.
    let held = |text, size| -> Vec<Vec<(u64, u64)>> {
        let dim = &super::parse(text, &mesh).dims[0];
        mesh.coords().map(|coord| dim.runs(size, &mesh, &coord).to_vec()).collect()
    };
    // Both coordinates of tp hold the same.
    let over_dp = |runs: [(u64, u64); 4]| -> Vec<Vec<(u64, u64)>> {
        let run = |it: (u64, u64)| if it.1 > 0 { vec![it] } else { vec![] };
        runs.into_iter().flat_map(|it| [run(it), run(it)]).collect()
    };
    assert_eq!(held("[dp]", 1280), over_dp([(0, 320), (320, 320), (640, 320), (960, 320)]));
    assert_eq!(held("[dp%128]", 1280), over_dp([(0, 384), (384, 384), (768, 384), (1152, 128)]));
    assert_eq!(held("[dp%128]", 256), over_dp([(0, 128), (128, 128), (0, 0), (0, 0)]));
    // 640 rows over dp, of each half.
    let of_halves = [(0, 256), (256, 256), (512, 128), (0, 0)];
    let both = of_halves.into_iter().flat_map(|(start, len)| [(start, len), (640 + start, len)]);
    let both: Vec<Vec<_>> = both.map(|it| if it.1 > 0 { vec![it] } else { vec![] }).collect();
    assert_eq!(held("[tp.dp%128]", 1280), both);
    let join = |text, sizes: &[u64]| -> Option<String> {
        let dims = super::parse(text, &mesh).dims;
        let parts: Vec<_> = dims.into_iter().zip(sizes.iter().copied()).collect();
        let dims = [DimLayout::join(&parts, &mesh)?].into_iter().collect();
        Some(Sharding { dims, partial: None }.display(&mesh).to_string())
    };
    let some = |it: &str| Some(it.to_string());
    // 10 blocks over 4; 8 blocks over 4; 5 of blocks of 2 blocks; behind another dim.
    assert_eq!(join("[dp, _]", &[10, 128]), some("[dp%128]"));
    assert_eq!(join("[dp, _]", &[8, 128]), some("[dp]"));
    assert_eq!(join("[dp%2, _]", &[10, 64]), some("[dp%128]"));
    assert_eq!(join("[tp, dp, _]", &[2, 5, 128]), some("[tp.dp%128]"));
    assert_eq!(join("[dp, tp]", &[10, 128]), None);
    assert_eq!(super::parse("[dp]", &mesh).dims[0].split(&[], &mesh), None);
}

#[test]
fn copies_share_the_writing() {
    let mesh = Mesh::new(&[("dp_replicate", 2), ("dp_shard", 4)]);
    let writers = |text, salt| -> Vec<u64> {
        let sharding = super::parse(text, &mesh);
        (0..8).filter(|&it| sharding.owns(&mesh.coord_of(it), &mesh, salt)).collect()
    };
    assert_eq!(writers("[dp_shard]", 0), [0, 2, 5, 7]);
    assert_eq!(writers("[dp_shard]", 1), [1, 3, 4, 6]);
    // Whole tensors go round the ranks.
    assert_eq!(
        (0..9).flat_map(|it| writers("[_]", it)).collect::<Vec<u64>>(),
        [0, 1, 2, 3, 4, 5, 6, 7, 0]
    );
}

#[track_caller]
fn check_error<T: std::fmt::Debug>(result: Result<T, PlacementError>, text: &str) {
    assert_eq!(result.unwrap_err().to_string(), text);
}

#[test]
fn impossible_layouts_are_errors() {
    let mesh = Mesh::new(&[("dp", 2), ("tp", 4)]);
    let parse = |text| Sharding::parse(text, &mesh);
    check_error(parse("[pp, _]"), "the mesh has no axis `pp`; its axes are dp, tp");
    check_error(
        parse("[tp, tp]"),
        "axis `tp` is used in dim 0 and again in dim 1; an axis can cut a tensor once",
    );
    check_error(
        parse("[tp, _] sum(tp)"),
        "axis `tp` shards dim 0 and is also partial; reduce over it before sharding over it",
    );
    check_error(
        parse("tp"),
        "`tp` is not a sharding: it starts with no `[`; write it as `[dp.tp, _]` or `[_, _] sum(tp)`",
    );
    check_error(
        parse("[tp, ]"),
        "`[tp, ]` is not a sharding: a dimension is empty; write `_` where it is whole; write it as \
         `[dp.tp, _]` or `[_, _] sum(tp)`",
    );
    check_error(
        parse("[_] prod(tp)"),
        "`[_] prod(tp)` is not a sharding: a reduction is sum, avg, max or min; write it as \
         `[dp.tp, _]` or `[_, _] sum(tp)`",
    );
    check_error(
        parse("[tp%x]"),
        "`[tp%x]` is not a sharding: `%x` is no granule; write a number from 1 to 4294967295, \
         behind all axes, as in `[tp.dp%128]`; write it as `[dp.tp, _]` or `[_, _] sum(tp)`",
    );
    check_error(
        parse("[tp%0]"),
        "`[tp%0]` is not a sharding: `%0` is no granule; write a number from 1 to 4294967295, \
         behind all axes, as in `[tp.dp%128]`; write it as `[dp.tp, _]` or `[_, _] sum(tp)`",
    );
    check_error(
        parse("[tp%128]").unwrap().validate(&[200], &mesh),
        "dim 0 of 200 is cut in multiples of 128, which does not divide it; use a granule that does",
    );
    check_error(
        parse("[tp%128]").unwrap().to_torch(&mesh),
        "dim 0 is cut in multiples of 128, and PyTorch has no placement for that; its boxes are in the \
         checkpoint's metadata all the same",
    );
    check_error(
        parse("[tp]").unwrap().validate(&[4, 4], &mesh),
        "the layout has 1 dimensions and the tensor has 2; write one entry per dimension",
    );
    let torch = |placements: &[Placement]| Sharding::from_torch(placements, 2, &mesh);
    check_error(
        torch(&[Placement::Replicate]),
        "1 placements for a mesh of 2 axes (dp, tp); write one per axis",
    );
    check_error(
        torch(&[Placement::Shard { dim: 2 }, Placement::Replicate]),
        "axis `dp` shards dim 2, but the tensor has 2 dimensions, counted from 0",
    );
    check_error(
        torch(&[
            Placement::StridedShard { dim: 0, split: 3 },
            Placement::StridedShard { dim: 0, split: 2 },
        ]),
        "dim 0: the split of 2 for axis `tp` cuts into 3 blocks that are already there, so a gather \
         could not put the pieces back; use a split that divides 3 or that 3 divides",
    );
    check_error(
        torch(&[Placement::StridedShard { dim: 1, split: 2 }, Placement::Shard { dim: 1 }]),
        "dim 1: axis `tp` of size 4 does not divide the 2 blocks that it has to share out, so a \
         gather could not put the pieces back; give the axis that makes the blocks a split that 4 \
         divides, or `tp` one of at least 2",
    );
    check_error(
        torch(&[Placement::Partial(ReduceOp::Sum), Placement::Partial(ReduceOp::Max)]),
        "partial values of two kinds, sum and max; reduce one of them first",
    );
}

#[test]
fn impossible_meshes_are_errors() {
    check_error(
        Mesh::new(&[("dp", 0)]).validate(),
        "mesh axis `dp` of size 0: an axis needs at least one coordinate",
    );
    check_error(
        Mesh::new(&[("dp", 1 << 20), ("tp", 1 << 20)]).validate(),
        "mesh axis `tp` of size 1048576: with it the mesh has more than 2^20 ranks, the most that \
         planc plans for; use smaller axes",
    );
    check_error(
        Mesh::new(&[("dp", 2), ("dp", 2)]).validate(),
        "mesh axis `dp` of size 2: the name is taken by an earlier axis; rename one of them",
    );
    check_error(
        Mesh::new(&[("x2", 2)]).validate(),
        "mesh axis `x2` of size 2: a name is letters, digits and `_`, starts with a letter, and is \
         not `x2` and the like",
    );
    check_error(
        Mesh::new(&[("tp", 4)]).refine("tp", 3, "a", "b"),
        "axis `tp` of size 4 cannot be refined into 3 times a whole number; use a size that 3 divides",
    );
}

#[test]
fn part_of_an_axis_has_no_torch_name() {
    let mesh = Mesh::new(&[("dp", 2), ("tp", 4)]).refine("tp", 2, "tp_kv", "tp_rep").unwrap();
    assert_eq!(mesh.user_axes(), [("dp", 2), ("tp", 4)]);
    let torch = |text| super::parse(text, &mesh).to_torch(&mesh);
    let whole = Ok(vec![Placement::StridedShard { dim: 0, split: 4 }, Placement::Shard { dim: 0 }]);
    assert_eq!(torch("[tp_kv.tp_rep.dp]"), whole);
    assert_eq!(torch("[tp.dp]"), whole);
    assert_eq!(
        torch("[_] sum(tp)"),
        Ok(vec![Placement::Replicate, Placement::Partial(ReduceOp::Sum)])
    );
    check_error(
        torch("[tp_kv]"),
        "dim 0: `tp_kv` is only a part of mesh axis `tp`; PyTorch can write it only together with, \
         and next to, the other parts",
    );
    for text in ["[tp_rep.tp_kv]", "[tp_kv.dp.tp_rep]", "[tp_kv, tp_rep]", "[tp_rep]"] {
        assert!(torch(text).is_err(), "{text}");
    }
    assert!(torch("[_] sum(tp_rep)").is_err());
}

/// Buffers are larger than what is valid in them; copies go by the shapes of the buffers.
#[test]
fn copies_step_over_padding() {
    let copied = |src: &[u64], dst: &[u64], runs: &[&[(u64, u64, u64)]]| {
        let runs: Vec<_> = runs.iter().map(|it| it.iter().copied().collect()).collect();
        let mut res = Vec::new();
        for_each_copy(src, dst, &runs, |src, dst, len| res.push((src, dst, len)));
        res
    };
    assert_eq!(copied(&[], &[], &[]), [(0, 0, 1)]);
    assert_eq!(copied(&[3, 4], &[2, 5], &[&[(1, 0, 2)], &[(0, 2, 3)]]), [(4, 2, 3), (8, 7, 3)]);
    // Rows that are whole on both sides are one stretch.
    assert_eq!(copied(&[3, 4], &[2, 4], &[&[(1, 0, 2)], &[(0, 0, 4)]]), [(4, 0, 8)]);
    assert_eq!(copied(&[3, 4], &[2, 4], &[&[(1, 0, 2)], &[]]), []);
}
