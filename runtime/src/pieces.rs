//! Making a rank's part of a tensor: piece by piece, so that no copy of it all is on the host, and
//! each piece on several threads.

use std::thread::scope;

use ir::placement::for_each_copy;
use ir::plan::{Buffer, Plan};

use crate::bind::BoundPlan;
use crate::error::RunError;
use crate::session::held;

/// Elements of a piece: 256 MiB of f32.
const PIECE: usize = 64 << 20;

/// The fewest elements that a thread is started for.
const SHARE: usize = 64 << 10;

/// Elements that lie together: the first one's global index and place in the piece, and how many.
pub type Stretch = (u64, usize, usize);

/// Calls `write` for each piece of what a rank holds of a buffer, padding included, in order: with
/// its first element, its length and what of it is not padding.
pub fn for_each_piece(
    plan: &Plan,
    bound: &BoundPlan,
    buffer: Buffer,
    write: impl FnMut(usize, usize, &[Stretch]) -> Result<(), RunError>,
) -> Result<(), RunError> {
    let len = bound.buffers[buffer].len;
    let shape = plan.local_shape(buffer);
    let runs = held(plan, buffer, &bound.coord);
    let stretches = |each: &mut dyn FnMut(u64, u64, u64)| {
        for_each_copy(&plan.buffers[buffer].ty.shape, &shape, &runs, each);
    };
    cut(len, PIECE, stretches, write)
}

/// Cuts stretches, given in ascending local order, into pieces of `piece` elements.
fn cut(
    len: usize,
    piece: usize,
    stretches: impl FnOnce(&mut dyn FnMut(u64, u64, u64)),
    mut write: impl FnMut(usize, usize, &[Stretch]) -> Result<(), RunError>,
) -> Result<(), RunError> {
    let (mut start, mut held, mut result) = (0, Vec::new(), Ok(()));
    stretches(&mut |mut global, at, n| {
        let (mut at, end) = (at as usize, (at + n) as usize);
        while at < end && result.is_ok() {
            if at >= start + piece {
                result = write(start, piece, &held);
                held.clear();
                start += piece;
                continue;
            }
            let n = (end - at).min(start + piece - at);
            held.push((global, at - start, n));
            global += n as u64;
            at += n;
        }
    });
    result?;
    while start < len {
        let n = piece.min(len - start);
        write(start, n, &held)?;
        held.clear();
        start += n;
    }
    Ok(())
}

/// Makes `values` a piece of `len` elements: `fetch` gives those from a global index on, the rest is
/// zero. What comes out does not depend on the number of threads.
pub fn fill<T: Clone + Default + Send>(
    values: &mut Vec<T>,
    len: usize,
    stretches: &[Stretch],
    threads: usize,
    fetch: &(impl Fn(u64, &mut [T]) + Sync),
) {
    values.clear();
    values.resize(len, T::default());
    let share = len.div_ceil(threads).max(SHARE);
    if len <= share {
        return fill_part(values, 0, stretches, fetch);
    }
    scope(|scope| {
        for (i, part) in values.chunks_mut(share).enumerate() {
            scope.spawn(move || fill_part(part, i * share, stretches, fetch));
        }
    });
}

/// Sets the elements `start ..` of a piece.
fn fill_part<T>(
    part: &mut [T],
    start: usize,
    stretches: &[Stretch],
    fetch: &impl Fn(u64, &mut [T]),
) {
    let end = start + part.len();
    let first = stretches.partition_point(|&(_, at, n)| at + n <= start);
    for &(global, at, n) in stretches[first..].iter().take_while(|it| it.1 < end) {
        let (from, to) = (at.max(start), (at + n).min(end));
        fetch(global + (from - at) as u64, &mut part[from - start..to - start]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Pieces of 4, of a buffer of 3 x 5 of which 2 x 3 are held: rows 7 .. 10 and 17 .. 20.
    #[test]
    fn stretches_are_cut_at_pieces() {
        let mut pieces = Vec::new();
        let stretches = |each: &mut dyn FnMut(u64, u64, u64)| {
            each(7, 0, 3);
            each(17, 5, 3);
        };
        let all = cut(15, 4, stretches, |start, len, held| {
            pieces.push((start, len, held.to_vec()));
            Ok(())
        });
        assert_eq!(all, Ok(()));
        let expect =
            [(0, 4, vec![(7, 0, 3)]), (4, 4, vec![(17, 1, 3)]), (8, 4, vec![]), (12, 3, vec![])];
        assert_eq!(pieces, expect);
    }

    #[test]
    fn a_stretch_may_cover_several_pieces() {
        let mut pieces = Vec::new();
        let _ = cut(
            9,
            4,
            |each| each(100, 1, 8),
            |start, _, held| {
                pieces.push((start, held.to_vec()));
                Ok(())
            },
        );
        let expect = [(0, vec![(100, 1, 3)]), (4, vec![(103, 0, 4)]), (8, vec![(107, 0, 1)])];
        assert_eq!(pieces, expect);
    }

    #[test]
    fn an_error_ends_it() {
        let mut calls = 0;
        let result = cut(
            9,
            2,
            |each| each(0, 0, 9),
            |_, _, _| {
                calls += 1;
                Err(RunError::Stopped)
            },
        );
        assert_eq!((result, calls), (Err(RunError::Stopped), 1));
    }

    #[test]
    fn any_number_of_threads_makes_the_same() {
        let n = 3 * SHARE + 17;
        // Every tenth element is padding.
        let stretches: Vec<Stretch> = (0..n / 10).map(|it| (it as u64 * 100, it * 10, 9)).collect();
        let fetch = |start: u64, out: &mut [u64]| {
            out.iter_mut().enumerate().for_each(|(i, it)| *it = start + i as u64 + 1);
        };
        let made = |threads| {
            let mut values = vec![7; 5];
            fill(&mut values, n, &stretches, threads, &fetch);
            values
        };
        let one = made(1);
        assert_eq!((one[8], one[9], one[10], one[n - 1]), (9, 0, 101, 0));
        assert_eq!(one.len(), n);
        assert!([2, 3, 64].into_iter().all(|it| made(it) == one));
    }
}
