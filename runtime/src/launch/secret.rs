//! The secret that the processes of a job share, and the proofs that they know it.
//!
//! Each side of a connection sends a random nonce, and proves itself by the HMAC of both nonces: rank 0
//! first, so that a rank tells nothing to an impostor. The two proofs differ in a label, so that none can be
//! sent back, and a recorded one is of other nonces. The keys that seal all later frames come from the same
//! nonces, one for each direction ([`Seal`]).
//!
//! ```text
//! rank -> rank 0   magic, nonce of the rank
//! rank 0 -> rank   magic, nonce of rank 0, proof of rank 0
//! rank -> rank 0   proof of the rank, then sealed frames, the first a hello
//! ```
//!
//! Without a secret the same bytes are sent under a key that everybody knows, which proves nothing.

use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use hmac::{Hmac, KeyInit, Mac};
use rustix::rand::{GetRandomFlags, getrandom};
use sha2::Sha256;

use super::Env;
use crate::comm::control::frame::{Frames, Limits, Seal, Sender};
use crate::error::RunError;

/// The secret of a job.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret {
    bytes: Vec<u8>,
    /// The file that it is from.
    file: Option<PathBuf>,
}

const VALUE: &str = "PLANC_JOB_SECRET";
const FILE: &str = "PLANC_JOB_SECRET_FILE";

/// Fewer bytes than this can be guessed.
const SHORTEST: usize = 16;

/// A file with more bytes than this is another file.
const LONGEST: usize = 4096;

impl Secret {
    /// The secret of `--job-secret-file`, else of the environment.
    pub fn find(flag: Option<&Path>, env: Env) -> Result<Option<Secret>, RunError> {
        match (flag, env(FILE), env(VALUE)) {
            (Some(path), ..) => Secret::read(path).map(Some),
            (None, Some(_), Some(_)) => {
                let why = format!("is there twice, since {FILE} is set as well; unset one of them");
                Err(RunError::JobSecret { from: VALUE.to_string(), why })
            }
            (None, Some(path), None) => Secret::read(Path::new(&path)).map(Some),
            (None, None, Some(value)) => Secret::new(value.into_bytes(), VALUE).map(Some),
            (None, None, None) => Ok(None),
        }
    }

    fn read(path: &Path) -> Result<Secret, RunError> {
        let from = format!("`{}`", path.display());
        let mut bytes = Vec::new();
        let read =
            File::open(path).and_then(|it| it.take(LONGEST as u64 + 1).read_to_end(&mut bytes));
        if let Err(error) = read {
            return Err(RunError::JobSecret { from, why: format!("cannot be read: {error}") });
        }
        Ok(Secret { file: Some(path.to_path_buf()), ..Secret::new(bytes, &from)? })
    }

    fn new(bytes: Vec<u8>, from: &str) -> Result<Secret, RunError> {
        // The end of a line is none of the secret: editors and `echo` add one.
        let bytes = bytes.trim_ascii().to_vec();
        let why = match bytes.len() {
            0..SHORTEST => format!(
                "has {} bytes, which can be guessed; give at least {SHORTEST}, as \
                 `openssl rand -hex 32` makes them",
                bytes.len()
            ),
            SHORTEST..=LONGEST => return Ok(Secret { bytes, file: None }),
            _ => format!("has more than {LONGEST} bytes; name the file that has the secret only"),
        };
        Err(RunError::JobSecret { from: from.to_string(), why })
    }

    /// The file that it is from, if every user of the machine can read that.
    pub(super) fn open_file(&self) -> Option<&Path> {
        let file = self.file.as_deref()?;
        let mode = file.metadata().ok()?.permissions().mode();
        (mode & 0o004 != 0).then_some(file)
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

/// Bytes of a nonce and of a proof.
pub(super) const NONCE: usize = 32;

/// The random bytes of both ends of one connection.
#[derive(Debug, Clone, Copy)]
pub struct Nonces {
    /// The bytes of the rank that connects.
    pub other: [u8; NONCE],
    /// The bytes of rank 0.
    pub first: [u8; NONCE],
}

/// Random bytes that nobody can foresee.
pub fn nonce() -> io::Result<[u8; NONCE]> {
    let mut res = [0; NONCE];
    // Requests of up to 256 bytes are never cut short.
    getrandom(&mut res, GetRandomFlags::empty())?;
    Ok(res)
}

/// The key of a job, from its secret and its name: jobs that share a port do not know each other's.
#[derive(Clone)]
pub struct Key(Hmac<Sha256>);

impl Key {
    /// The key of a job; without a secret, everybody has it.
    pub fn of(secret: Option<&Secret>, job: &str) -> Key {
        let secret = hmac(secret.map_or(&[], |it| &it.bytes[..]));
        let key = secret.chain_update("planc job ").chain_update(job).finalize().into_bytes();
        Key(hmac(&key))
    }

    /// The key of connections that need a random number of the run as well.
    pub fn of_run(&self, number: &[u8; NONCE]) -> Key {
        let key = self.0.clone().chain_update("planc run ").chain_update(number);
        Key(hmac(&key.finalize().into_bytes()))
    }

    fn labelled(&self, label: &str, sender: Sender, nonces: &Nonces) -> Hmac<Sha256> {
        let sender = match sender {
            Sender::First => " of rank 0",
            Sender::Other => " of a rank",
        };
        let mac = self.0.clone().chain_update(label).chain_update(sender);
        mac.chain_update(nonces.other).chain_update(nonces.first)
    }

    /// The proof that `sender` knows the key.
    pub fn proof(&self, sender: Sender, nonces: &Nonces) -> [u8; NONCE] {
        self.labelled("planc proof", sender, nonces).finalize().into_bytes().into()
    }

    /// Returns true if that is the proof of `sender`. The time it takes does not depend on how far both agree.
    pub fn accepts(&self, sender: Sender, nonces: &Nonces, proof: &[u8]) -> bool {
        self.labelled("planc proof", sender, nonces).verify_slice(proof).is_ok()
    }

    /// The seal of what `sender` sends on this connection.
    pub fn seal(&self, sender: Sender, nonces: &Nonces) -> Seal {
        Seal::new(self.labelled("planc seal", sender, nonces).finalize().into_bytes().into())
    }

    /// The frames that `sender` sends on this connection.
    pub fn frames(&self, sender: Sender, nonces: &Nonces, limits: Limits) -> Frames {
        Frames::new(self.seal(sender, nonces), sender, limits)
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Key(..)")
    }
}

fn hmac(key: &[u8]) -> Hmac<Sha256> {
    Hmac::new_from_slice(key).expect("any length is a key")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reads `NAME=value` lines as an environment.
    fn find(flag: Option<&Path>, variables: &[(&str, &str)]) -> Result<Option<Secret>, RunError> {
        let env = |name: &str| variables.iter().find(|it| it.0 == name).map(|it| it.1.to_string());
        Secret::find(flag, &env)
    }

    const LONG: &str = "0123456789abcdef0123456789abcdef";

    #[test]
    fn a_secret_is_that_of_the_flag_else_of_the_environment() {
        let file = std::env::temp_dir().join(format!("planc-secret-{}", std::process::id()));
        std::fs::write(&file, format!("{LONG}\n")).expect("it can be written");
        let path = file.to_str().expect("it is text");
        let bytes = |it: Result<Option<Secret>, RunError>| {
            it.expect("it is a secret").map(|it| String::from_utf8_lossy(&it.bytes).into_owned())
        };
        let long = Some(LONG.to_string());
        assert_eq!(bytes(find(None, &[])), None);
        assert_eq!(bytes(find(None, &[(VALUE, LONG)])), long);
        assert_eq!(bytes(find(None, &[(FILE, path)])), long);
        assert_eq!(bytes(find(Some(&file), &[(VALUE, "another one, 0123")])), long);
        let check = |flag: Option<&Path>, variables: &[(&str, &str)], expect: &str| {
            let error = find(flag, variables).expect_err("it is none");
            assert_eq!((error.code(), error.to_string().as_str()), ("PL0567", expect));
        };
        check(
            None,
            &[(VALUE, LONG), (FILE, path)],
            "the job secret of PLANC_JOB_SECRET is there twice, since PLANC_JOB_SECRET_FILE is set as \
             well; unset one of them",
        );
        check(
            None,
            &[(VALUE, "hunter2")],
            "the job secret of PLANC_JOB_SECRET has 7 bytes, which can be guessed; give at least 16, \
             as `openssl rand -hex 32` makes them",
        );
        check(
            Some(Path::new("/dev/zero")),
            &[],
            "the job secret of `/dev/zero` has more than 4096 bytes; name the file that has the secret \
             only",
        );
        check(
            None,
            &[(FILE, "/not/there")],
            "the job secret of `/not/there` cannot be read: No such file or directory (os error 2)",
        );
        std::fs::remove_file(&file).expect("it is there");
    }

    /// Neither a secret nor a key is printed with what has it.
    #[test]
    fn a_secret_is_not_printed() {
        let secret = Secret::new(LONG.into(), VALUE).expect("long enough");
        let key = Key::of(Some(&secret), "job");
        let nonces = Nonces { other: [1; NONCE], first: [2; NONCE] };
        let text = format!("{secret:?} {key:?} {:?}", key.seal(Sender::First, &nonces));
        assert_eq!(text, "Secret(..) Key(..) Seal(0)");
    }

    #[test]
    fn a_proof_is_of_one_secret_job_side_and_connection() {
        let secret = |it: &str| Secret::new(it.into(), VALUE).expect("long enough");
        let ours = Key::of(Some(&secret(LONG)), "7");
        let nonces = Nonces { other: [1; NONCE], first: [2; NONCE] };
        let proof = ours.proof(Sender::Other, &nonces);
        assert!(ours.accepts(Sender::Other, &nonces, &proof));
        assert!(!ours.accepts(Sender::First, &nonces, &proof), "it cannot be sent back");
        for other in [
            Nonces { first: [3; NONCE], ..nonces },
            Nonces { other: [3; NONCE], ..nonces },
            Nonces { other: nonces.first, first: nonces.other },
        ] {
            assert!(!ours.accepts(Sender::Other, &other, &proof), "it is of one connection");
        }
        for other in [
            Key::of(Some(&secret(LONG)), "8"),
            Key::of(Some(&secret(&LONG.replace('0', "1"))), "7"),
            Key::of(None, "7"),
        ] {
            assert!(!other.accepts(Sender::Other, &nonces, &proof));
        }
        assert!(!ours.accepts(Sender::Other, &nonces, &proof[..31]));
        assert!(!ours.accepts(Sender::Other, &nonces, &[]));
    }
}
