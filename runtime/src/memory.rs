//! Memory of one rank: aligned bytes that can be read as numbers, and scratch that is reused.

use std::fmt;

use bytemuck::{AnyBitPattern, NoUninit};
use half::bf16;
use ir::DType;
use ir::quant::Format;

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

    /// Their number.
    pub(crate) fn len(&self) -> usize {
        self.len
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

/// Elements as f64, from bytes of any alignment.
pub(crate) fn widened(dtype: DType, bytes: &[u8]) -> Vec<f64> {
    match dtype {
        DType::F32 => words(bytes).map(|it| f32::from_ne_bytes(it).into()).collect(),
        DType::Bf16 => words(bytes).map(|it| bf16::from_ne_bytes(it).to_f64()).collect(),
        DType::I32 => words(bytes).map(|it| i32::from_ne_bytes(it).into()).collect(),
        DType::E4M3 => bytes.iter().map(|&it| Format::E4M3.decode(it).into()).collect(),
        DType::E5M2 => bytes.iter().map(|&it| Format::E5M2.decode(it).into()).collect(),
    }
}

fn words<const N: usize>(bytes: &[u8]) -> impl Iterator<Item = [u8; N]> + '_ {
    bytes.as_chunks::<N>().0.iter().copied()
}

/// Vectors to compute in, kept between ops.
#[derive(Debug, Default)]
pub struct Scratch(Vec<Vec<f32>>);

impl Scratch {
    /// A vector of `len` elements of any content.
    pub fn take(&mut self, len: usize) -> Vec<f32> {
        // The smallest that fits, else the largest, to grow.
        let rank = |it: &Vec<f32>| match it.capacity() {
            fits if fits >= len => (0, fits),
            short => (1, usize::MAX - short),
        };
        let best = self.0.iter().enumerate().min_by_key(|it| rank(it.1)).map(|it| it.0);
        let mut res = best.map(|it| self.0.swap_remove(it)).unwrap_or_default();
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_aligned_and_keep_their_length() {
        let mut it = Bytes::zeroed(13);
        assert_eq!(it.all().len(), 13);
        it.slice_mut::<f32>(8, 1)[0] = 1.5;
        assert_eq!(it.slice::<f32>(4, 2), [0.0, 1.5]);
        it.assign(&[1, 2, 3]);
        assert_eq!(it.all(), [1, 2, 3]);
        it.assign(&[]);
        assert!(it.all().is_empty());
    }

    #[test]
    fn scratch_is_reused() {
        let mut scratch = Scratch::default();
        scratch.give(vec![1.0; 100]);
        scratch.give(vec![1.0; 10]);
        let small = scratch.take(5);
        assert_eq!((small.len(), small.capacity()), (5, 10));
        let large = scratch.take(50);
        assert_eq!((large.len(), large.capacity()), (50, 100));
        scratch.give(small);
        assert_eq!(scratch.take(40).len(), 40);
        assert!(scratch.0.is_empty());
    }
}
