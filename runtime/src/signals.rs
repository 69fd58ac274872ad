//! SIGTERM, SIGINT and SIGUSR1 of a run.
//!
//! ```text
//!             before the first step   while steps are trained                 again
//! SIGTERM     exit code 143           the step is finished and saved; 143     the same
//! SIGINT      exit code 130           the step is finished and saved; 130     exit code 130, at once
//! SIGUSR1     nothing                 the step is finished and saved          the same
//! ```

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use signal_hook::consts::{SIGINT, SIGTERM, SIGUSR1};
use signal_hook::flag::{register, register_conditional_shutdown, register_usize};

use crate::comm::control::Wish;

/// The signals that have come to this process since they were last asked for.
#[derive(Debug, Default)]
pub struct Signals {
    /// SIGTERM or SIGINT, or 0.
    stop: Arc<AtomicUsize>,
    save: Arc<AtomicBool>,
    /// No step is lost with this process.
    idle: Arc<AtomicBool>,
    /// There was a SIGINT.
    interrupted: Arc<AtomicBool>,
}

impl Signals {
    /// Takes the three signals over from the system.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn install() -> io::Result<Signals> {
        let res = Signals { idle: Arc::new(AtomicBool::new(true)), ..Signals::default() };
        for signal in [SIGTERM, SIGINT] {
            register_conditional_shutdown(signal, 128 + signal, res.idle.clone())?;
        }
        // In this order: the first SIGINT finds the flag as it was, and sets it.
        register_conditional_shutdown(SIGINT, 128 + SIGINT, res.interrupted.clone())?;
        register(SIGINT, res.interrupted.clone())?;
        for signal in [SIGTERM, SIGINT] {
            register_usize(signal, res.stop.clone(), signal as usize)?;
        }
        register(SIGUSR1, res.save.clone())?;
        Ok(res)
    }

    /// Steps begin: from here on, signals wait for their end.
    pub(crate) fn begin(&self) {
        self.idle.store(false, Ordering::SeqCst);
    }

    /// The strongest wish since the last call.
    pub(crate) fn wish(&self) -> Option<Wish> {
        let save = self.save.swap(false, Ordering::SeqCst).then_some(Wish::Save);
        match self.stop.swap(0, Ordering::SeqCst) {
            0 => save,
            signal => Some(Wish::Stop(signal as u8)),
        }
    }
}

/// `SIGTERM`, for the signals that end a run.
pub fn signal_name(signal: u8) -> &'static str {
    match i32::from(signal) {
        SIGTERM => "SIGTERM",
        SIGINT => "SIGINT",
        _ => "a signal",
    }
}
