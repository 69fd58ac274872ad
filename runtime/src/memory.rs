//! Memory of one rank: aligned bytes that can be read as numbers, and scratch that is reused.

use std::fmt;

use bytemuck::{AnyBitPattern, NoUninit};

/// Bytes, aligned for every element type.
#[derive(Clone, Default)]
pub struct Bytes {
    words: Vec<u64>,
    len: usize,
}

impl fmt::Debug for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Bytes({})", self.len)
    }
}

impl Bytes {
    /// `len` zeros.
    pub fn zeroed(len: usize) -> Bytes {
        Bytes { words: vec![0; len.div_ceil(8)], len }
    }

    /// All of them.
    pub fn all(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.words)[..self.len]
    }

    /// All of them.
    pub fn all_mut(&mut self) -> &mut [u8] {
        &mut bytemuck::cast_slice_mut(&mut self.words)[..self.len]
    }

    /// Makes it a copy of `bytes`, keeping the allocation.
    pub fn assign(&mut self, bytes: &[u8]) {
        self.words.resize(bytes.len().div_ceil(8), 0);
        self.len = bytes.len();
        self.all_mut().copy_from_slice(bytes);
    }

    /// `len` elements from byte `offset` on, which is a multiple of their size.
    pub fn slice<T: AnyBitPattern>(&self, offset: usize, len: usize) -> &[T] {
        bytemuck::cast_slice(&self.all()[offset..offset + len * size_of::<T>()])
    }

    /// `len` elements from byte `offset` on, which is a multiple of their size.
    pub fn slice_mut<T: AnyBitPattern + NoUninit>(
        &mut self,
        offset: usize,
        len: usize,
    ) -> &mut [T] {
        bytemuck::cast_slice_mut(&mut self.all_mut()[offset..offset + len * size_of::<T>()])
    }
}

/// Vectors to compute in, kept between ops.
#[derive(Debug, Default)]
pub struct Scratch(Vec<Vec<f32>>);

impl Scratch {
    /// A vector of `len` elements of any content.
    pub fn take(&mut self, len: usize) -> Vec<f32> {
        // The smallest that fits, else the largest, to grow.
        let fits = |it: &&(usize, usize)| it.1 >= len;
        let sizes: Vec<(usize, usize)> = self.0.iter().map(Vec::capacity).enumerate().collect();
        let best = sizes.iter().filter(fits).min_by_key(|it| it.1);
        let found = best.or_else(|| sizes.iter().max_by_key(|it| it.1)).map(|it| it.0);
        let mut res = found.map(|it| self.0.swap_remove(it)).unwrap_or_default();
        if res.capacity() < len {
            // What it holds does not have to be kept while it grows.
            res.clear();
        }
        res.resize(len, 0.0);
        res
    }

    /// Gives a vector back.
    pub fn give(&mut self, it: Vec<f32>) {
        self.0.push(it);
    }
}
