//! Which of cuBLASLt's algorithms is fastest for a problem: measured once, remembered on disk.
//!
//! The heuristic's first guess is mostly right; among eight, another one gains 3 to 10 % in about a
//! sixth of the cases. Times of a warming GPU drift by as much. So the candidates are measured in turns,
//! and the first is kept unless another is clearly faster.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use kernels::cuda::{GEMM_WORKSPACE, GemmCall, ScaleOf};

use super::{ALIGNMENT, Addresses, Algorithm, CublasLt, Descriptors, Problem, version};
use crate::backend::cuda::cache::Cache;
use crate::backend::cuda::driver::{CudaEvent, CudaStream, Device, DeviceMemory, cuda};
use crate::error::RunError;

/// Candidates of a problem.
const CANDIDATES: usize = 8;
/// How often each is measured.
const ROUNDS: usize = 7;
/// Length of one measurement: long against the events' half microsecond.
const MEASURE_MS: f32 = 1.0;
/// Most runs in one measurement.
const RUNS_MAX: usize = 50;
/// Another candidate replaces the first if it takes at most this part of its time.
const GAIN: f32 = 0.97;
/// A candidate this much slower than the first in the first round is not measured again.
const HOPELESS: f32 = 1.25;
/// Device memory that tuning leaves free.
const LEAVE: u64 = 1 << 30;

/// An algorithm for each of `calls`, in order, as bytes for [`super::Gemm::new`].
///
/// Called on one rank, with the context of `device` current and before its memory is taken; the other
/// ranks are told, so that replicas of a plan run the same algorithms. What is not known yet is
/// measured for at most `budget`, on memory that is freed again; the heuristic's first is taken for
/// what no time or memory is left for. Fails where cuBLASLt has no algorithm for a call.
pub fn tune(
    device: Device,
    calls: &[GemmCall],
    budget: Duration,
) -> Result<Vec<Vec<u8>>, RunError> {
    let cache = Cache::of_user();
    let machine = format!("{}, cuBLASLt {}", device.name()?, version(CublasLt::get()?));
    let mut known = Known::read(&cache, &machine);
    let mut chosen: BTreeMap<Problem, Vec<u8>> = BTreeMap::new();
    let mut fresh: Vec<(Descriptors, Vec<Algorithm>)> = Vec::new();
    for problem in calls.iter().map(Problem::of) {
        if chosen.contains_key(&problem) {
            continue;
        }
        let descriptors = Descriptors::new(device, problem)?;
        let remembered = known.get(&problem).filter(|it| descriptors.checked(it).is_ok());
        let bytes = match remembered {
            Some(bytes) => bytes,
            None => {
                let candidates = descriptors.candidates(CANDIDATES)?;
                let first = candidates[0].bytes();
                fresh.push((descriptors, candidates));
                first
            }
        };
        chosen.insert(problem, bytes);
    }
    let measured = measure_all(device, &fresh, budget)?;
    for (problem, bytes) in &measured {
        known.set(problem, bytes);
    }
    if !measured.is_empty() {
        known.write(&cache, &machine);
    }
    chosen.extend(measured);
    Ok(calls.iter().map(|it| chosen[&Problem::of(it)].clone()).collect())
}

/// The fastest algorithm of each problem that there is time and memory for.
fn measure_all(
    device: Device,
    fresh: &[(Descriptors, Vec<Algorithm>)],
    budget: Duration,
) -> Result<Vec<(Problem, Vec<u8>)>, RunError> {
    let start = Instant::now();
    let room = device.memory()?.0.saturating_sub(LEAVE);
    let needs = fresh.iter().map(|it| Scratch::of(&it.0.problem).bytes);
    let Some(bytes) = needs.filter(|&it| it <= room).max() else { return Ok(Vec::new()) };
    let bench = match Bench::new(bytes) {
        Ok(bench) => bench,
        // Another process took it in the meantime.
        Err(RunError::OutOfDeviceMemory { .. }) => return Ok(Vec::new()),
        Err(other) => return Err(other),
    };
    let mut res = Vec::new();
    for (descriptors, candidates) in fresh {
        if start.elapsed() >= budget {
            break;
        }
        if Scratch::of(&descriptors.problem).bytes <= bytes {
            let fastest = bench.fastest(descriptors, candidates)?;
            res.push((descriptors.problem, fastest.bytes()));
        }
    }
    Ok(res)
}

/// Where a problem's operands are in the memory for measuring.
#[derive(Debug, Clone, Copy)]
struct Scratch {
    a: u64,
    b: u64,
    /// Those of `a`, those of `b`.
    scales: [u64; 2],
    out: u64,
    bias: u64,
    /// Empty where nothing is activated.
    gelu: u64,
    workspace: u64,
    /// Of all.
    bytes: u64,
}

impl Scratch {
    fn of(problem: &Problem) -> Scratch {
        let Problem { m, n, k, a, b, out, .. } = *problem;
        let mut end = 0;
        let mut take = |rows: usize, cols: usize, element: u64| {
            let at = end;
            let bytes = rows as u64 * cols as u64 * element;
            end = (at + bytes).next_multiple_of(u64::from(ALIGNMENT));
            at
        };
        let of = problem.scales.map(|it| it.0);
        Scratch {
            a: take(m, k, a.0.bytes()),
            b: take(k, n, b.0.bytes()),
            scales: [
                take(1, of.map_or(0, |it| n_scales(it[0], m, k)), 4),
                take(1, of.map_or(0, |it| n_scales(it[1], n, k)), 4),
            ],
            out: take(m, n, out.bytes()),
            bias: take(1, n, out.bytes()),
            gelu: take(if problem.gelu { m } else { 0 }, n, out.bytes()),
            workspace: take(1, GEMM_WORKSPACE as usize, 1),
            bytes: end,
        }
    }

    /// With all offsets from `base`. What is added is the result's own memory.
    fn addresses(&self, base: u64, problem: &Problem) -> Addresses {
        Addresses {
            a: base + self.a,
            b: base + self.b,
            scales: problem.scales.map(|_| self.scales.map(|it| base + it)),
            c: problem.accumulate.then_some(base + self.out),
            bias: problem.bias.then_some(base + self.bias),
            gelu: problem.gelu.then_some(base + self.gelu),
            out: base + self.out,
        }
    }
}

/// Scales of a matrix `[rows, k]`.
fn n_scales(of: ScaleOf, rows: usize, k: usize) -> usize {
    let blocks = k.div_ceil(128);
    match of {
        ScaleOf::Tensor => 1,
        ScaleOf::Row => rows * blocks,
        ScaleOf::Block => rows.div_ceil(128) * blocks.next_multiple_of(4),
    }
}

/// Memory and a stream to measure on.
struct Bench {
    memory: DeviceMemory,
    stream: CudaStream,
    start: CudaEvent,
    end: CudaEvent,
}

impl Bench {
    fn new(bytes: u64) -> Result<Bench, RunError> {
        let memory = DeviceMemory::new(bytes)?;
        fill(&memory)?;
        Ok(Bench {
            memory,
            stream: CudaStream::new()?,
            start: CudaEvent::timed()?,
            end: CudaEvent::timed()?,
        })
    }

    /// The algorithm to take. One that does not run is not taken.
    fn fastest(
        &self,
        descriptors: &Descriptors,
        candidates: &[Algorithm],
    ) -> Result<Algorithm, RunError> {
        let mut running: Vec<(Algorithm, Vec<f32>)> = Vec::new();
        let mut runs = 1;
        for candidate in candidates {
            // The first run of a kernel loads it.
            let Ok(_) = self.milliseconds(descriptors, candidate, 1) else { continue };
            if running.is_empty() {
                let once = self.milliseconds(descriptors, candidate, 1)?;
                runs = ((MEASURE_MS / once.max(1e-3)) as usize).clamp(1, RUNS_MAX);
            }
            running.push((*candidate, Vec::new()));
        }
        if running.len() < 2 {
            return Ok(running.first().map_or(candidates[0], |it| it.0));
        }
        for round in 0..ROUNDS {
            for (candidate, times) in &mut running {
                times.push(self.milliseconds(descriptors, candidate, runs)?);
            }
            if round == 0 {
                let limit = running[0].1[0] * HOPELESS;
                running.retain(|it| it.1[0] <= limit);
            }
        }
        let medians: Vec<f32> = running.iter_mut().map(|it| median(&mut it.1)).collect();
        Ok(running[choice(&medians)].0)
    }

    /// The time of `runs` runs.
    fn milliseconds(
        &self,
        descriptors: &Descriptors,
        candidate: &Algorithm,
        runs: usize,
    ) -> Result<f32, RunError> {
        let scratch = Scratch::of(&descriptors.problem);
        let at = scratch.addresses(self.memory.address, &descriptors.problem);
        let workspace = (self.memory.address + scratch.workspace, GEMM_WORKSPACE);
        self.start.record(&self.stream)?;
        for _ in 0..runs {
            descriptors.run(candidate, &at, workspace, &self.stream)?;
        }
        self.end.record(&self.stream)?;
        self.end.synchronize()?;
        self.start.milliseconds_to(&self.end)
    }
}

fn median(times: &mut [f32]) -> f32 {
    times.sort_by(f32::total_cmp);
    times[times.len() / 2]
}

/// The fastest, or the first if none is clearly faster.
fn choice(medians: &[f32]) -> usize {
    let best = (0..medians.len()).min_by(|&a, &b| medians[a].total_cmp(&medians[b]));
    best.filter(|&it| medians[it] <= medians[0] * GAIN).unwrap_or(0)
}

/// Fills memory with numbers between -1 and 1 of mixed size. Zeros would draw less power and so run
/// faster. As f32, two bf16 are a number of the size of the second; as FP8, a bf16 is two numbers of less
/// than 2.
fn fill(memory: &DeviceMemory) -> Result<(), RunError> {
    const TILE: u64 = 8 << 20;
    let tile = numbers((TILE / 2) as usize);
    let mut filled = TILE.min(memory.bytes);
    memory.write(0, &bytemuck::cast_slice(&tile)[..filled as usize])?;
    while filled < memory.bytes {
        let more = filled.min(memory.bytes - filled);
        cuda!(cuMemcpyDtoD_v2(memory.address + filled, memory.address, more as usize))?;
        filled += more;
    }
    // Copies on the device do not wait, and the stream does not wait for them.
    cuda!(cuCtxSynchronize())
}

/// `n` bf16.
fn numbers(n: usize) -> Vec<u16> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let number = |_| {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let unit = (state >> 40) as f32 / (1 << 24) as f32;
        // Without this bit the lower byte is no code of NaN.
        half::bf16::from_f32(2.0 * unit - 1.0).to_bits() & !0x40
    };
    (0..n).map(number).collect()
}

/// What was measured before, on any machine: machine, problem, algorithm in hexadecimal.
#[derive(Debug, Default)]
struct Known(BTreeMap<String, String>);

impl Known {
    /// Changes with what [`super::preference`] asks for.
    const FILE: &str = "gemm-1.json";

    fn all(cache: &Cache) -> BTreeMap<String, BTreeMap<String, String>> {
        let bytes = cache.read(Known::FILE).unwrap_or_default();
        serde_json::from_slice(&bytes).unwrap_or_default()
    }

    fn read(cache: &Cache, machine: &str) -> Known {
        Known(Known::all(cache).remove(machine).unwrap_or_default())
    }

    /// Adds them to the file, whatever another process has written there meanwhile.
    fn write(&self, cache: &Cache, machine: &str) {
        let mut all = Known::all(cache);
        all.entry(machine.to_string()).or_default().extend(self.0.clone());
        if let Ok(text) = serde_json::to_vec_pretty(&all) {
            cache.write(Known::FILE, &text);
        }
    }

    fn get(&self, problem: &Problem) -> Option<Vec<u8>> {
        let text = self.0.get(&problem.to_string())?;
        let digits = text.as_bytes().chunks(2);
        digits.map(|it| u8::from_str_radix(std::str::from_utf8(it).ok()?, 16).ok()).collect()
    }

    fn set(&mut self, problem: &Problem, bytes: &[u8]) {
        let text = bytes.iter().map(|it| format!("{it:02x}")).collect();
        self.0.insert(problem.to_string(), text);
    }
}

#[cfg(test)]
mod tests {
    use ir::DType;
    use ir::quant::Format;

    use super::*;
    use crate::backend::cuda::cache::tests::Temporary;

    fn problem(m: usize) -> Problem {
        let (a, b) = ((DType::Bf16, true), (DType::Bf16, false));
        let (accumulate, bias, gelu) = (true, true, false);
        let scales = None;
        Problem { m, n: 3, k: 5, a, b, scales, out: DType::F32, accumulate, bias, gelu }
    }

    #[test]
    fn the_first_stays_unless_another_is_clearly_faster() {
        assert_eq!(choice(&[1.0, 0.98, 2.0]), 0);
        assert_eq!(choice(&[1.0, 0.96, 0.95, 2.0]), 2);
        assert_eq!(choice(&[1.0]), 0);
    }

    #[test]
    fn what_was_measured_is_known_again_on_that_machine() {
        let folder = Temporary::new("known");
        let algorithm: Vec<u8> = (0..64).map(|it| it * 3).collect();
        let mut known = Known::read(&folder.0, "H200, cuBLASLt 13.1.0");
        assert_eq!(known.get(&problem(7)), None);
        known.set(&problem(7), &algorithm);
        known.write(&folder.0, "H200, cuBLASLt 13.1.0");
        // Another process adds to it.
        let mut other = Known::default();
        other.set(&problem(8), &algorithm);
        other.write(&folder.0, "H200, cuBLASLt 13.1.0");
        let known = Known::read(&folder.0, "H200, cuBLASLt 13.1.0");
        assert_eq!(known.get(&problem(7)), Some(algorithm.clone()));
        assert_eq!(known.get(&problem(8)), Some(algorithm));
        assert_eq!(Known::read(&folder.0, "H200, cuBLASLt 13.2.0").get(&problem(7)), None);
    }

    #[test]
    fn a_broken_file_knows_nothing() {
        let folder = Temporary::new("broken");
        folder.0.write(Known::FILE, b"{\"H200\": {\"");
        assert!(Known::read(&folder.0, "H200").0.is_empty());
        let digits = |text: &str| Known([(problem(7).to_string(), text.to_string())].into());
        assert_eq!(digits("0g").get(&problem(7)), None);
        assert_eq!(digits("\u{e9}1").get(&problem(7)), None);
    }

    /// 7x5 and 5x3 bf16, 7x3 and 3 f32, each rounded up to 256 bytes.
    #[test]
    fn operands_for_measuring_do_not_overlap() {
        let it = Scratch::of(&problem(7));
        assert_eq!([it.a, it.b, it.out, it.bias, it.workspace], [0, 256, 512, 768, 1024]);
        assert_eq!(it.bytes, 1024 + (64 << 20));
        let at = it.addresses(1 << 20, &problem(7));
        assert_eq!((at.c, at.bias, at.gelu), (Some(at.out), Some((1 << 20) + 768), None));
        // 7 scales of 5 numbers, 3 of 5, which do not fill a block.
        let codes = Problem { scales: Some(([ScaleOf::Row, ScaleOf::Block], false)), ..problem(7) };
        let it = Scratch::of(&codes);
        assert_eq!((it.scales, it.out), ([512, 768], 1024));
        let mlp = Problem { accumulate: false, gelu: true, ..problem(7) };
        let it = Scratch::of(&mlp);
        assert_eq!([it.gelu, it.workspace], [1024, 1280]);
        assert_eq!(it.addresses(1 << 20, &mlp).gelu, Some((1 << 20) + 1024));
    }

    #[test]
    fn numbers_to_measure_with_are_finite_in_all_types() {
        let bits = numbers(1 << 12);
        let bf16 = bits.iter().map(|&it| half::bf16::from_bits(it).to_f32());
        let f32 =
            bits.chunks(2).map(|it| f32::from_bits(u32::from(it[1]) << 16 | u32::from(it[0])));
        assert!(bf16.chain(f32).all(|it| it.abs() <= 1.01));
        let codes = bits.iter().flat_map(|it| it.to_le_bytes());
        let numbers =
            codes.flat_map(|it| [Format::E4M3, Format::E5M2].map(|format| format.decode(it)));
        assert!(numbers.into_iter().all(|it| it.abs() < 2.0));
    }
}
