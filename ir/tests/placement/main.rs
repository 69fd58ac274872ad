//! The placement algebra against PyTorch, against brute force, and against itself.

mod golden;
mod properties;
mod reports;
mod reshard;

use ir::placement::{Axis, Digit, DimLayout, Mesh, Sharding};

/// The elements of a tensor of `shape` that the coordinate holds, as row-major indices, in local
/// order.
fn indices(sharding: &Sharding, shape: &[u64], mesh: &Mesh, coord: &[u32]) -> Vec<u64> {
    let mut res = vec![0];
    for (dim, &size) in sharding.dims.iter().zip(shape) {
        let held = rows(dim, size, mesh, coord);
        res = res.iter().flat_map(|&it| held.iter().map(move |&row| it * size + row)).collect();
    }
    res
}

fn rows(layout: &DimLayout, size: u64, mesh: &Mesh, coord: &[u32]) -> Vec<u64> {
    layout.runs(size, mesh, coord).iter().flat_map(|&(start, len)| start..start + len).collect()
}

/// What every rank holds, for the tensor whose values are its row-major indices.
fn scattered(sharding: &Sharding, shape: &[u64], mesh: &Mesh) -> Vec<Vec<f64>> {
    let local = |coord: &[u32]| {
        indices(sharding, shape, mesh, coord).into_iter().map(|it| it as f64).collect()
    };
    mesh.coords().map(|coord| local(&coord)).collect()
}

fn axis(mesh: &Mesh, name: &str) -> Axis {
    mesh.axis(name).unwrap()
}

fn parse(text: &str, mesh: &Mesh) -> Sharding {
    Sharding::parse(text, mesh).unwrap()
}

fn layout(digits: &[Digit]) -> DimLayout {
    DimLayout::new(digits.iter().copied())
}
