//! What users of other systems reported, with the right value. Numbers are those of our list of
//! reports; each names the upstream issue.

use ir::placement::{
    AxisSet, CommCost, DimLayout, Mesh, Placement, Sharding, StepKind, apply_steps, reshard,
    step_bytes, step_cost,
};

use super::{axis, parse, rows, scattered};

/// Rows per rank, in rank order.
fn held(layout: &DimLayout, size: u64, mesh: &Mesh) -> Vec<Vec<u64>> {
    mesh.coords().map(|coord| rows(layout, size, mesh, &coord)).collect()
}

fn boxes(layout: &DimLayout, size: u64, mesh: &Mesh) -> Vec<Vec<(u64, u64)>> {
    mesh.coords().map(|coord| layout.runs(size, mesh, &coord).to_vec()).collect()
}

fn strided(dim: u8, split: u32) -> Placement {
    Placement::StridedShard { dim, split }
}

// C01, pytorch#168134.
#[test]
fn lone_strided_shard_of_uneven_size_is_a_bijection() {
    let mesh = Mesh::new(&[("tp", 2)]);
    let sharding = Sharding::from_torch(&[strided(0, 2)], 1, &mesh).unwrap();
    assert_eq!(boxes(&sharding.dims[0], 5, &mesh), [vec![(0, 2), (3, 1)], vec![(2, 1), (4, 1)]]);

    for axes in
        [&[("a", 2)][..], &[("a", 3)], &[("a", 4)], &[("a", 2), ("b", 2)], &[("a", 2), ("b", 4)]]
    {
        let mesh = Mesh::new(axes);
        for split in 1..=8 {
            let mut placements = vec![strided(0, split)];
            placements.resize(axes.len(), Placement::Shard { dim: 0 });
            let Ok(sharding) = Sharding::from_torch(&placements, 1, &mesh) else { continue };
            for size in 1..64 {
                let mut all: Vec<u64> = held(&sharding.dims[0], size, &mesh).concat();
                all.sort();
                assert_eq!(all, (0..size).collect::<Vec<u64>>(), "{placements:?}");
            }
        }
    }
}

// C03, pytorch PR#163843.
#[test]
fn fsdp_over_tp_cuts_tp_first() {
    let check = |mesh: &[(&str, u32)], size, expected: &[&[u64]]| {
        let mesh = Mesh::new(mesh);
        let tp = mesh.size(axis(&mesh, "tp"));
        let placements = [strided(0, tp), Placement::Shard { dim: 0 }];
        let sharding = Sharding::from_torch(&placements, 1, &mesh).unwrap();
        assert_eq!(held(&sharding.dims[0], size, &mesh), expected);
    };
    check(&[("dp", 2), ("tp", 2)], 6, &[&[0, 1], &[3, 4], &[2], &[5]]);
    check(&[("dp", 2), ("tp", 2)], 5, &[&[0, 1], &[3], &[2], &[4]]);
    check(&[("dp", 2), ("tp", 4)], 7, &[&[0], &[2], &[4], &[6], &[1], &[3], &[5], &[]]);
}

// C04, pytorch#161368 and PR#150862.
#[test]
fn empty_shards_start_at_the_end_and_own_nothing() {
    let mesh = Mesh::new(&[("a", 4), ("b", 2)]);
    let sharding = parse("[a.b]", &mesh);
    for size in 0..4 {
        let chunks: Vec<_> =
            mesh.coords().map(|coord| sharding.chunks(&[size], &mesh, &coord)).collect();
        let rows: u64 = chunks.iter().flatten().map(|it| it.sizes[0]).sum();
        assert_eq!(rows, size);
        assert_eq!(chunks.iter().filter(|it| !it.is_empty()).count() as u64, size);
    }
    let empty = mesh.coord_of(7);
    assert_eq!(sharding.dims[0].start(2, &mesh, &empty), 2);

    let mesh = Mesh::new(&[("dp", 30)]);
    let layout = &parse("[dp]", &mesh).dims[0];
    // 29 full shards of 137 rows, as torch.chunk cuts, and the last is short.
    assert_eq!(layout.runs(4096, &mesh, &[29])[0], (29 * 137, 123));
    assert_eq!(layout.extent(29, &mesh, &[29]), 0);
    assert_eq!(layout.start(29, &mesh, &[29]), 29);
}

// C05, pytorch PR#188947.
#[test]
fn metadata_and_data_are_cut_by_one_function() {
    let mesh = Mesh::new(&[("dp", 3)]);
    let sharding = parse("[dp, _]", &mesh);
    let boxes: Vec<(u64, u64)> = mesh
        .coords()
        .map(|coord| {
            let chunk = sharding.chunks(&[7, 2], &mesh, &coord)[0].clone();
            assert_eq!(sharding.extents(&[7, 2], &mesh, &coord), chunk.sizes);
            (chunk.offsets[0], chunk.sizes[0])
        })
        .collect();
    assert_eq!(boxes, [(0, 3), (3, 3), (6, 1)]);
    assert_eq!(sharding.local_shape(&[7, 2], &mesh).as_slice(), [3, 2]);
}

// C10, jax#26946 and jax#27808.
#[test]
fn sizes_that_do_not_divide_are_cut_and_not_replicated() {
    let mesh = Mesh::new(&[("data", 8)]);
    let sharding = parse("[data, _]", &mesh);
    let sizes: Vec<u64> =
        mesh.coords().map(|it| sharding.extents(&[17, 16], &mesh, &it)[0]).collect();
    assert_eq!(sizes, [3, 3, 3, 3, 3, 2, 0, 0]);
    assert!(!sharding.divides(&[17, 16], &mesh));
}

// C58, xla#15207 and jax#21562.
#[test]
fn resharding_two_axes_into_one_dimension_gathers_nothing() {
    let mesh = Mesh::new(&[("x", 4), ("y", 2)]);
    let shape = [16, 16, 16];
    let (from, to) = (parse("[y, _, x]", &mesh), parse("[_, x.y, _]", &mesh));
    let shard = 16 * 16 * 16 / 8 * 4;
    for cost in costs() {
        let steps = reshard(&from, &to, &shape, 4, &mesh, &cost).unwrap();
        let mut at = &from;
        let mut sent = 0.0;
        for step in &steps {
            let local: u64 = step.to.local_shape(&shape, &mesh).iter().product();
            assert!(local * 4 <= 2 * shard, "{steps:?}");
            sent += step_bytes(step, at, &shape, 4, &mesh);
            at = &step.to;
        }
        assert!(sent <= 2.0 * shard as f64, "{steps:?}");
        let locals = scattered(&from, &shape, &mesh);
        let out = apply_steps(&steps, &from, &shape, &mesh, locals);
        assert_eq!(out, scattered(&to, &shape, &mesh));
    }
}

// C59, pytorch#157585 and #132751.
#[test]
fn swapping_the_sharded_dimensions_does_not_replicate() {
    let mesh = Mesh::new(&[("dp", 16), ("tp", 8)]);
    let shape = [256, 256];
    let (from, to) = (parse("[dp, tp]", &mesh), parse("[tp, dp]", &mesh));
    for cost in costs() {
        let steps = reshard(&from, &to, &shape, 4, &mesh, &cost).unwrap();
        let axes: AxisSet = mesh.axes().collect();
        assert_eq!(
            steps.iter().map(|it| it.kind).collect::<Vec<_>>(),
            [StepKind::Permute { axes }]
        );
        let locals = scattered(&from, &shape, &mesh);
        let out = apply_steps(&steps, &from, &shape, &mesh, locals);
        assert_eq!(out, scattered(&to, &shape, &mesh));
    }
    // `S(0)S(0) -> RS(0)` moves more than `S(0)S(0) -> S(0)R`: the minor axis is the one that a
    // gather takes off.
    let price = |to: &str| {
        let (from, to) = (parse("[dp.tp, _]", &mesh), parse(to, &mesh));
        let cost = CommCost { latency: 0.0, bandwidth: 1.0 };
        let mut at = from.clone();
        let mut res = 0.0;
        for step in reshard(&from, &to, &shape, 4, &mesh, &cost).unwrap() {
            res += step_cost(&step, &at, &shape, 4, &mesh, &cost);
            at = step.to;
        }
        res
    };
    assert!(price("[tp, _]") > price("[dp, _]"));
}

/// Latency alone, bandwidth alone, and both.
fn costs() -> [CommCost; 3] {
    [(1.0, 1e30), (0.0, 1.0), (1e-5, 1e9)]
        .map(|(latency, bandwidth)| CommCost { latency, bandwidth })
}
