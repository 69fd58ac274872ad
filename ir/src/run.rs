//! `Run`: what the runtime needs besides the program: data, schedule, seed.

use serde::{Deserialize, Serialize};

/// Defaults of `planc run`; part of the plan, in RON.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Run {
    /// Steps to train when the command line does not say.
    pub steps: u64,
    /// Seed of initial weights and of generated data.
    pub seed: u64,
    /// Sequences of one step, over all micro-batches and ranks.
    pub global_batch: u64,
    /// Tokens of a sequence.
    pub sequence: u64,
    /// Token ids are below this.
    pub vocab: u64,
    /// Label that does not count.
    pub ignore_index: i64,
    /// Learning rate over steps.
    pub schedule: Schedule,
}

/// Learning rate of step `s` (from 0): a linear warm-up, then a decay.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Schedule {
    /// Peak.
    pub lr: f64,
    /// Steps over which it rises linearly: step `s` has `(s + 1) / warmup` of the peak.
    #[serde(default)]
    pub warmup: u64,
    /// What follows.
    #[serde(default)]
    pub decay: Decay,
}

/// How the learning rate falls after the warm-up.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub enum Decay {
    /// It does not.
    #[default]
    Constant,
    /// In a straight line to `min` at step `until`.
    Linear {
        /// The step (from 0) at which `min` is reached.
        until: u64,
        /// The final learning rate.
        min: f64,
    },
    /// Along half a cosine to `min` at step `until`.
    Cosine {
        /// The step (from 0) at which `min` is reached.
        until: u64,
        /// The final learning rate.
        min: f64,
    },
}

impl Default for Run {
    fn default() -> Run {
        let schedule = Schedule { lr: 1e-3, warmup: 0, decay: Decay::Constant };
        Run {
            steps: 1,
            seed: 0,
            global_batch: 1,
            sequence: 1,
            vocab: 1,
            ignore_index: -100,
            schedule,
        }
    }
}

impl Schedule {
    /// Learning rate of step `step`, from 0.
    pub fn at(&self, step: u64) -> f64 {
        if step < self.warmup {
            return self.lr * (step + 1) as f64 / self.warmup as f64;
        }
        let progress = |until: u64| {
            let span = until.saturating_sub(self.warmup).max(1);
            ((step - self.warmup) as f64 / span as f64).min(1.0)
        };
        match self.decay {
            Decay::Constant => self.lr,
            Decay::Linear { until, min } => self.lr + (min - self.lr) * progress(until),
            Decay::Cosine { until, min } => {
                let cosine = (std::f64::consts::PI * progress(until)).cos();
                min + (self.lr - min) * 0.5 * (1.0 + cosine)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(decay: Decay, expect: &[(u64, f64)]) {
        let schedule = Schedule { lr: 1.0, warmup: 4, decay };
        for &(step, lr) in expect {
            assert!((schedule.at(step) - lr).abs() < 1e-12, "step {step}: {}", schedule.at(step));
        }
    }

    #[test]
    fn warms_up_then_decays() {
        check(Decay::Constant, &[(0, 0.25), (3, 1.0), (100, 1.0)]);
        check(Decay::Linear { until: 14, min: 0.0 }, &[(4, 1.0), (9, 0.5), (14, 0.0), (20, 0.0)]);
        check(Decay::Cosine { until: 14, min: 0.2 }, &[(4, 1.0), (9, 0.6), (14, 0.2)]);
    }
}
